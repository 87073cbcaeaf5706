"""Calls in the package against their annotations, as the tests of `FILES` make them."""

import os
import pathlib
import subprocess
import sys

import pytest

import stowax

TESTS = pathlib.Path(__file__).parent
SOURCE = str(pathlib.Path(stowax.__file__).parents[1])
# No bad input among them: its tests want stowax's own messages.
FILES = (
    "test_memory.py",
    "test_planner.py",
    "test_update_elementwise.py",
    "test_hazards_stacks.py",
)


def run(*arguments, cwd=TESTS.parent):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    return subprocess.run(
        [*command, "-p", "typechecked", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(TESTS), SOURCE))},
    )


@pytest.mark.slow
def test_what_is_annotated_is_what_is_passed():
    found = run("-m", "not slow", *(str(TESTS / name) for name in FILES))
    assert found.returncode == 0, found.stdout[-5000:]
    assert " passed" in found.stdout


@pytest.mark.slow
def test_another_type_is_found(tmp_path):
    (tmp_path / "test_planted.py").write_text(
        "from stowax._units import format_bytes\n\n\n"
        "def test_planted():\n    format_bytes('many')\n"
    )
    found = run(str(tmp_path / "test_planted.py"), cwd=tmp_path)
    assert found.returncode == 1
    assert "BeartypeCallHintParamViolation" in found.stdout
