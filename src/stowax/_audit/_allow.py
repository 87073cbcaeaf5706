"""What a user means to do: kinds that are allowed, by option or by a comment; no JAX.

`--allow KIND`, `--allow KIND:file.py`, or on the line itself `# stowax: allow KIND`.
"""

import dataclasses
import difflib
import linecache
import os
import re
from collections.abc import Sequence

from .._errors import ArgumentError
from .._records._audit import AUDIT_KINDS, AuditRecord, Finding

_COMMENT = re.compile(r"#\s*stowax:\s*allow\s+([\w\s,-]+)")


def checked(allow: str | Sequence[str]) -> tuple[str, ...]:
    """The rules, each with a kind that there is.

    **Raises:** `ArgumentError`.
    """
    rules = (allow,) if isinstance(allow, str) else tuple(allow)
    for rule in rules:
        kind = str(rule).partition(":")[0]
        if kind not in AUDIT_KINDS:
            near = difflib.get_close_matches(kind, AUDIT_KINDS, n=1, cutoff=0.4)
            instead = f"Did you mean {near[0]}?" if near else ", ".join(AUDIT_KINDS)
            raise ArgumentError("allow", repr(rule), f"Write KIND[:FILE]. {instead}")
    return rules


def without_allowed(record: AuditRecord, rules: tuple[str, ...]) -> AuditRecord:
    """`record`, with what is meant so apart."""
    allowed = tuple(f for f in record.findings if _is_allowed(f, rules))
    left = tuple(f for f in record.findings if f not in allowed)
    return dataclasses.replace(record, findings=left, allowed=allowed)


def _is_allowed(finding: Finding, rules: tuple[str, ...]) -> bool:
    for rule in rules:
        kind, colon, file = rule.partition(":")
        if kind == finding.kind and (not colon or _is_file(finding.file, file)):
            return True
    found = _COMMENT.search(linecache.getline(finding.file, finding.line))
    return found is not None and finding.kind in re.split(r"[\s,]+", found[1])


def _is_file(path: str, wanted: str) -> bool:
    ending = os.sep + os.path.normpath(wanted).lstrip(os.sep)
    return os.path.abspath(path).endswith(ending)
