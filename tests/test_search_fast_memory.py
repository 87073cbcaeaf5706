"""The last program for a TPU, with more of its fast memory for each kernel."""

import pytest

from planner_problems import chain
from stand_in_search import GPU, TPU, searching
from stowax._errors import CompileError
from stowax._survey._asked import MOST_MISSES
from stowax._survey._options import FAST_MEMORY

# Three values of 8 bytes of which one can be kept; the link carries one for nothing.
BODY = chain(count=10, bytes=8, needed=(1, 2, 3), forward_seconds=3.0)
BUDGET = 250


# --- more of a TPU's fast memory ------------------------------------------------------


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_the_best_is_compiled_with_more_and_the_faster_stays(monkeypatch, factor):
    search, compiler = searching(
        monkeypatch,
        BODY,
        BUDGET,
        target=TPU,
        factor=lambda options: factor if FAST_MEMORY in options else 1.0,
    )
    best = search.run()
    assert sum(FAST_MEMORY in options for _, options in compiler.compiled) == 1
    assert FAST_MEMORY in compiler.compiled[-1][1]
    assert (FAST_MEMORY in best.options) == (factor < 1)


def test_a_compiler_that_refuses_more_costs_no_plan(monkeypatch):
    def refuses(decisions, options):
        if FAST_MEMORY in options:
            raise CompileError("too much")

    search, _ = searching(monkeypatch, BODY, BUDGET, target=TPU, refuses=refuses)
    assert FAST_MEMORY not in search.run().options


@pytest.mark.parametrize("told", ["a GPU", "the user's own", "compiles"])
def test_where_it_is_not_asked_for_nothing_more_is_compiled(monkeypatch, told):
    target = GPU if told == "a GPU" else TPU
    compiles = MOST_MISSES if told == "compiles" else None
    search, compiler = searching(
        monkeypatch, BODY, BUDGET, target=target, compiles=compiles
    )
    mine = {FAST_MEMORY: "1"} if told == "the user's own" else {}
    search.asked.compiler_options = mine
    search.run()
    assert {options.get(FAST_MEMORY) for _, options in compiler.compiled} == {
        mine.get(FAST_MEMORY)
    }
