"""A command's standard output is its result: nothing of a solver's library is in it."""

import ctypes
import os
import subprocess
import sys

import pytest
import scipy.optimize

from planner_problems import chain, problem
from stowax._planner import solve

PRINTS = """
import ctypes
from stowax._planner._stdout import silent_stdout

c = ctypes.CDLL(None)
c.printf(b"before, ")
with silent_stdout():
    c.printf(b"of the solver")
print("after")
"""


def test_what_the_solver_prints_is_not_in_standard_output(monkeypatch, capfd):
    real = scipy.optimize.milp

    def talking(*args, **options):
        ctypes.CDLL(None).puts(b"transformNewIntegerFeasibleSolution")
        os.write(1, b"tmpSolver.run()")
        return real(*args, **options)

    monkeypatch.setattr(scipy.optimize, "milp", talking)
    assert solve(problem(chain(), device_bytes=150)).outcome == "optimal"
    print("the result")
    assert capfd.readouterr().out == "the result\n"


def test_what_others_print_around_it_is():
    """Also what C code has printed before and not written yet."""
    done = subprocess.run(
        [sys.executable, "-c", PRINTS], capture_output=True, text=True, check=True
    )
    assert "of the solver" not in done.stdout
    assert {*done.stdout.replace("after\n", "").split(", ")} == {"before", ""}
    assert "after\n" in done.stdout


@pytest.mark.slow
def test_without_a_standard_output_it_is_solved_all_the_same():
    code = (
        "import os; os.close(1)\n"
        "from planner_problems import chain, problem\n"
        "from stowax._planner import solve\n"
        "found = solve(problem(chain(), device_bytes=150))\n"
        "import sys; sys.exit(found.outcome != 'optimal')"
    )
    folder = os.path.dirname(__file__)
    subprocess.run([sys.executable, "-c", code], check=True, cwd=folder)
