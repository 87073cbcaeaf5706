"""What the planner refuses, and the baselines it compares with."""

import dataclasses

import pytest

from planner_layers import h100, llama_layer
from planner_problems import (
    EVERY,
    GIB,
    chain,
    operation,
    problem,
    replaced,
)
from stowax._errors import ArgumentError
from stowax._planner import OPTIMAL_GAP, baselines, named, smallest, solve
from test_planner import at


def by_name(p, name):
    return next(v.index for v in p.bodies[0].values if v.name == name)


@pytest.fixture(scope="module")
def llama():
    return h100(llama_layer(), device_bytes=80 * GIB)


@pytest.mark.parametrize("pin", sorted(EVERY))
def test_pins_are_respected(llama, pin):
    i = by_name(llama, "mlp.gate")
    body = replaced(llama.bodies[0], i, allowed=frozenset({pin}))
    p = dataclasses.replace(at(llama, 0.4), bodies=(body,))
    solution = solve(p)
    assert solution.decisions[0][i] == pin
    assert solution.evaluation.fits(p)
    free = solve(at(llama, 0.4)).evaluation.seconds
    assert solution.evaluation.seconds >= free * (1 - OPTIMAL_GAP)


def test_a_pin_away_from_keep_is_kept_to_when_all_would_fit(llama):
    i = by_name(llama, "mlp.gate")
    body = replaced(llama.bodies[0], i, allowed=frozenset({"recompute"}))
    solution = solve(dataclasses.replace(at(llama, 2.0), bodies=(body,)))
    assert solution.decisions[0][i] == "recompute"
    assert solution.outcome == "optimal"
    assert solution.binding == ()


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (
            replaced(chain(), 0, allowed=frozenset({"recompute"})),
            "pin: got 'recompute' for 'v0' (model.py:1) of 'layer'. It cannot be "
            "recomputed: it is an input of the body. Allow 'keep' or 'offload' for it.",
        ),
        (
            replaced(
                replaced(chain(), 1, allowed=frozenset({"recompute"})),
                0,
                allowed=frozenset({"recompute"}),
                needed=False,
            ),
            "pin: got 'recompute' for 'v0' (model.py:1) of 'layer', which is needed to "
            "recompute 'v1' (model.py:2). It cannot be recomputed: it is an input of "
            "the body. Allow 'keep' or 'offload' for it.",
        ),
        (
            replaced(chain(in_loop=False), 1, allowed=frozenset({"offload"})),
            "pin: got 'offload' for 'v1' (model.py:2) of 'layer'. 'layer' is not a loop"
            ", so nothing of it can be offloaded. Allow 'recompute' or 'keep' for it.",
        ),
    ],
)
def test_impossible_pins_are_refused_by_name(body, text):
    for ask in (solve, smallest):
        with pytest.raises(ArgumentError) as caught:
            ask(problem(body))
        assert str(caught.value) == text


def test_bad_problems_are_refused():
    with pytest.raises(ArgumentError, match=r"^prefetch_depth: got 0. Write 1"):
        solve(problem(chain(), prefetch_depth=0))
    with pytest.raises(ArgumentError, match=r"^link: got 0.0 bytes per second"):
        solve(problem(chain(), rate=0.0))


def test_a_pin_may_ask_more_of_the_host_than_it_has():
    body = replaced(chain(), 0, allowed=frozenset({"offload"}))
    solution = solve(problem(body, host_bytes=79))
    assert solution.outcome == "infeasible"
    assert solution.binding == ("host memory",)
    assert solution.evaluation.host_bytes == 80


def test_baselines():
    body = chain(
        operations=(
            operation(0, (0,), (1,)),
            operation(1, (1,), (2,), repeatable=False),
            operation(2, (2,), (3,)),
        )
    )
    p = problem(body)
    assert baselines(p) == {
        "keep all": (("keep",) * 4,),
        "recompute all": (("keep", "recompute", "keep", "recompute"),),
        "offload layer inputs": (("offload", "recompute", "keep", "recompute"),),
    }
    straight = problem(dataclasses.replace(body, in_loop=False))
    assert baselines(straight)["offload layer inputs"][0][0] == "keep"


def test_inputs_of_a_bodys_later_layers_are_offloaded_by_their_name():
    """Two layers a run, each with its input named: by hand both would be offloaded."""
    body = chain(
        operations=(
            dataclasses.replace(operation(0, (0,), (1,)), primitive="name"),
            operation(1, (1,), (2,)),
            dataclasses.replace(operation(2, (2,), (3,)), primitive="name"),
        )
    )

    def offloaded(*names):
        values = (
            dataclasses.replace(v, name=name)
            for v, name in zip(body.values, names, strict=True)
        )
        p = problem(dataclasses.replace(body, values=tuple(values)))
        (chosen,) = baselines(p)["offload layer inputs"]
        return [i for i, decision in enumerate(chosen) if decision == "offload"]

    assert offloaded("input", "input", "middle", "input") == [0, 3]  # 1 is 0 itself
    assert offloaded("input", "input", "middle", "output") == [0]


def test_a_named_policy_stores_only_what_is_read():
    body = chain(needed=(3,))
    p = problem(replaced(body, 0, needed=False))

    def first_two(body, v):
        return v.index in (1, 2)

    assert named(p, keep=first_two) == ((None, None, "keep", "recompute"),)
    assert named(p, offload=first_two) == ((None, None, "offload", "recompute"),)


def test_no_bodies_is_a_problem_too():
    solution = solve(problem(other_seconds=3.0, loss_reserved_bytes=7))
    assert (solution.outcome, solution.evaluation.seconds) == ("unneeded", 3.0)
    assert solution.evaluation.device_bytes == 7
    over = solve(problem(device_bytes=6, loss_reserved_bytes=7))
    assert (over.outcome, over.decisions) == ("infeasible", ())
