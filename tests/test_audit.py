"""Faults of training loops are found at their line, and the loops without are clean."""

import inspect
import pathlib
import re

import pytest

import audit_loops
import audit_loops_programs
import stowax
from stowax._audit import _memory
from stowax._records._audit import AUDIT_KINDS

LEAST_BYTES = 4096
HERE = re.compile(r"# here: ([\w-]+)(?:, of (\w+))?")


def loops():
    found = {}
    for module in (audit_loops, audit_loops_programs):
        for name, function in vars(module).items():
            if f"{name}_clean" in vars(module):
                found[name] = (function, vars(module)[f"{name}_clean"])
    return found


LOOPS = loops()


def marked(function):
    """The kind that is planted in a loop, its file and its line."""
    lines, first = inspect.getsourcelines(function)
    whole = pathlib.Path(function.__code__.co_filename).read_text().splitlines()
    for number, text in enumerate(whole, 1):
        if found := HERE.search(text):
            own = first <= number < first + len(lines) and not found[2]
            if own or found[2] == function.__name__:
                return found[1], inspect.getsourcefile(function), number
    raise AssertionError(f"{function.__name__} has no line marked")


@pytest.fixture(autouse=True)
def _busy_machine(monkeypatch):
    """A thread that others keep from running is not the loop's fault."""
    monkeypatch.setattr(_memory, "_STARVED_SECONDS", 0.02)


def audited(function):
    audit = stowax.audit(least_bytes=LEAST_BYTES)
    raises = getattr(function, "raises", None)
    if raises is None:
        with audit:
            kept = function()
        del kept
    else:
        with pytest.raises(raises), audit:
            function()
    return audit


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_a_planted_fault_is_found_at_its_line_and_its_twin_is_clean(name):
    planted, clean = LOOPS[name]
    kind, file, line = marked(planted)
    found = audited(planted).findings
    assert (kind, file, line) in [(f.kind, f.file, f.line) for f in found], found
    assert {f.kind for f in found} <= {kind, *getattr(planted, "also", ())}, found
    assert audited(clean).findings == ()


def test_every_kind_is_planted():
    assert {marked(planted)[0] for planted, _ in LOOPS.values()} == set(AUDIT_KINDS)
    assert len(LOOPS) >= 24
