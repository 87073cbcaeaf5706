"""Tables in the documentation that repeat what the code says."""

import pathlib
import re

from stowax._hazards import HAZARD_KINDS
from stowax._records._audit import AUDIT_KINDS
from stowax._records._memory import MEMORY_ROLES

INSPECT = pathlib.Path(__file__).parent.parent / "docs" / "inspect.md"


def rows(text):
    """Both columns of every table row; of two with one beginning, the first."""
    found = re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|$", text, re.MULTILINE)
    return dict(reversed(found))


def test_every_hazard_is_listed_in_the_words_of_the_code():
    listed = {k.strip("`"): v for k, v in rows(INSPECT.read_text()).items()}
    kinds = dict(HAZARD_KINDS)
    assert {k: v for k, v in listed.items() if k in kinds} == kinds
    unknown = re.findall(r"^\| `([^`]+)` \|", INSPECT.read_text(), re.M)
    assert list(dict.fromkeys(unknown)) == list(kinds)


def test_every_role_of_memory_is_explained():
    explained = ", ".join(rows(INSPECT.read_text()))
    assert [role for role in MEMORY_ROLES if role not in explained] == []


def test_every_finding_of_an_audit_is_listed_in_the_words_of_the_code():
    listed = rows((INSPECT.parent / "audit.md").read_text())
    assert {k.strip("`"): v for k, v in listed.items() if "`" in k} == AUDIT_KINDS
