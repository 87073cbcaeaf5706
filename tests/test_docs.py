"""Tables in the documentation that repeat what the code says."""

import json
import pathlib
import re
import statistics

from stowax._hazards import HAZARD_KINDS
from stowax._records._audit import AUDIT_KINDS
from stowax._records._memory import MEMORY_ROLES

DOCS = pathlib.Path(__file__).parent.parent / "docs"
INSPECT = DOCS / "inspect.md"


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


def test_how_long_planning_takes_is_what_was_measured():
    def said(benchmark, target, field, **only):
        lines = (DOCS / "results" / f"{benchmark}.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        seconds = [
            made[field]
            for record in records
            if f", {target}, " in record["cell"]
            and field in (made := record["figures"])
            and only.items() <= made.items()
        ]
        low, high = min(seconds), max(seconds)
        return f"{low:.0f} to {high:.0f} s, median {statistics.median(seconds):.0f}"

    page = (DOCS / "start.md").read_text()
    for step, model in (
        ("transformer, layers in `jax.lax.scan`", "scan_transformer"),
        ("the same, layers in a Python loop", "loop_transformer"),
        ("Flax NNX, layers in a Python loop", "nnx_loop"),
    ):
        on_gpu, on_tpu = (
            said("budgets", target, "wall_seconds", model=model)
            for target in ("h200", "v5p-8")
        )
        assert f"| {step} | {on_gpu} | {on_tpu} |" in page
    straight = said("straight", "h200", "planning_seconds")
    assert f"| straight-line code: a U-Net, ResNet, … | {straight} |" in page
