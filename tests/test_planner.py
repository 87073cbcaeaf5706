"""The planner: its model, and that its solver finds what enumeration finds."""

import dataclasses
import itertools
import math

import pytest
from hypothesis import HealthCheck, given, settings

from planner_layers import h100, llama_layer
from planner_problems import (
    GIB,
    STORE,
    chain,
    operation,
    problem,
    replaced,
    small_problems,
    value,
)
from stowax._errors import ArgumentError
from stowax._planner import OPTIMAL_GAP, baselines, evaluate, smallest, solve
from stowax._planner._evaluate import priced
from stowax._planner._model import build
from stowax._planner._tables import tables
from stowax._records._stages import Point

QUICK = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
MOST = 1000  # plans to enumerate; larger random problems are passed over


def choices(body):
    """Every decision per value that the records allow, `None` for not stored."""
    for v in body.values:
        allowed = set(v.allowed) if body.in_loop else set(v.allowed) - {"offload"}
        stored = [] if v.available else sorted(allowed & STORE)
        must_store = v.needed and not v.available and "recompute" not in v.allowed
        yield stored if must_store else [None, *stored]


def respects(body, recomputed):
    """Whether only values are recomputed for which that is open."""
    return all("recompute" in body.values[i].allowed for i in recomputed)


def goes_in_turn(body, chosen):
    """Whether of state that crosses the link alike the smaller goes first."""
    if body.phase != "update" or not body.values[0].allowed >= STORE:
        return True
    by_host = {i for part in body.host_updates for i in part.values}
    lines: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    for v in body.values:
        if not v.passages:
            lines[v.index in by_host].append((v.bytes, v.index))
    gone = [[chosen[i] == "offload" for _, i in sorted(m)] for m in lines.values()]
    return all(line == sorted(line, reverse=True) for line in gone)


def enumerated(p, *, in_turn=True):
    """(decisions, evaluation) of everything that can be decided.

    The solver looks only at what goes `in_turn`; rounding may better its answer by
    something that does not.
    """
    prepared = tables(p)
    per_body = [itertools.product(*choices(body)) for body in p.bodies]
    for decisions in itertools.product(*per_body):
        try:
            evaluation = priced(p, prepared, decisions)  # what `evaluate` returns
        except ValueError:
            continue
        proper = not in_turn or all(map(goes_in_turn, p.bodies, decisions))
        if proper and all(map(respects, p.bodies, evaluation.recomputed)):
            yield decisions, evaluation


def size(p):
    return math.prod(len(c) for body in p.bodies for c in choices(body))


# ---------------------------------------------------------------- the model itself


def test_windows_closure_and_memory_in_symbols():
    count, b, rate = 10, 8, 8.0
    p = problem(chain(count, bytes=b), rate=rate, other_seconds=5.0)
    # v0 offloaded, v1 recomputed from it, v2 kept, v3 recomputed from v2.
    e = evaluate(p, (("offload", "recompute", "keep", None),))
    moved, rerun = b, 2.0
    assert e.recomputed == (frozenset({1, 3}),)
    assert e.recompute_seconds == count * rerun
    assert e.transfer_seconds == count * 2 * moved / rate
    assert e.exposed_seconds == moved / rate  # the first reload; windows hide the rest
    assert e.seconds == 5.0 + count * (3.0 + 6.0 + rerun) + moved / rate
    assert e.host_bytes == count * moved
    # kept stack + v0, v1, v3 alive at the point + the next run's v0, read early
    assert e.device_bytes == count * b + 3 * b + b
    assert e.forward_window_used == (moved / rate / 3.0,)
    assert e.backward_window_used == (moved / rate / (6.0 + rerun),)


def test_a_full_window_is_waited_for():
    count, b, rate = 10, 8, 2.0
    p = problem(chain(count, bytes=b), rate=rate)
    e = evaluate(p, (("offload", "offload", "recompute", "keep"),))
    copy = 2 * b / rate
    forward, backward = max(3.0, copy), max(6.0 + 1.0, copy)
    assert copy > 7.0
    assert e.seconds == count * (forward + backward) + copy
    assert e.exposed_seconds == pytest.approx(e.seconds - count * (3.0 + 6.0 + 1.0))


def test_without_pipelining_nothing_hides_and_nothing_is_staged():
    count, b, rate = 10, 8, 8.0
    p = problem(chain(count, bytes=b), rate=rate, prefetch_depth=1)
    e = evaluate(p, (("offload", "keep", "keep", "keep"),))
    assert e.seconds == count * (9.0 + 2 * b / rate)
    assert e.device_bytes == count * 3 * b + b


def test_later_bodies_are_freed_before_earlier_ones_run_backward():
    b = 8
    first = chain(2, bytes=b, name="first", points=(Point(reserved_bytes=0, live=()),))
    last = chain(5, bytes=b, name="last", points=(Point(reserved_bytes=7, live=()),))
    keep = ("keep",) * 4
    both = problem(first, last, loss_reserved_bytes=3)
    assert evaluate(both, (keep, keep)).device_bytes == 7 + 4 * b * (2 + 5)
    early = problem(
        dataclasses.replace(first, points=(Point(reserved_bytes=10**4, live=()),)), last
    )
    assert evaluate(early, (keep, keep)).device_bytes == 10**4 + 4 * b * 2


def test_an_operation_with_two_outputs_runs_again_once():
    values = (
        value(0, needed=True),
        value(1, operation=0, needed=True),
        value(2, operation=0, needed=True),
    )
    body = chain(
        values=values, operations=(operation(0, (0,), (1, 2), 1.5),), points=()
    )
    p = problem(body)
    assert evaluate(p, (("keep", None, None),)).recompute_seconds == 10 * 1.5
    assert evaluate(p, (("keep", None, "keep"),)).recompute_seconds == 10 * 1.5
    assert evaluate(p, (("keep", "keep", "keep"),)).recompute_seconds == 0.0


def test_stored_values_cut_the_closure_and_unread_ones_are_not_recomputed():
    body = chain(needed=(3,))
    p = problem(replaced(body, 0, needed=False))
    e = evaluate(p, (("keep", "recompute", "keep", "recompute"),))
    assert e.recomputed == (frozenset({3}),)


@pytest.mark.parametrize(
    ("body", "decisions", "words"),
    [
        (chain(), (None, "keep", "keep", "keep"), "an input of the body"),
        (
            chain(operations=(operation(0, (0,), (1,), repeatable=False),
                              operation(1, (1,), (2,)), operation(2, (2,), (3,)))),
            ("keep", None, "keep", "keep"),
            "made by op0, which must not run twice",
        ),
    ],
)  # fmt: skip
def test_evaluate_names_what_cannot_be_recomputed(body, decisions, words):
    index = decisions.index(None)
    with pytest.raises(ValueError) as caught:
        evaluate(problem(body), (decisions,))
    assert str(caught.value) == (
        f"'v{index}' (model.py:{index + 1}) of 'layer' is neither kept nor offloaded, "
        f"the backward pass needs it, and it cannot be recomputed: it is {words}. "
        "Decide 'keep' or 'offload' for it."
    )


def test_evaluate_refuses_decisions_of_another_problem():
    with pytest.raises(ArgumentError) as caught:
        evaluate(problem(chain()), (("keep",),))
    assert str(caught.value) == (
        "decisions: got (1,) entries per body. "
        "Give one entry per value of each body: (4,)."
    )
    with pytest.raises(ArgumentError, match="'v0' of 'layer', which is not a loop"):
        evaluate(problem(chain(in_loop=False)), (("offload",) + ("keep",) * 3,))


# ------------------------------------------------------- the solver, by enumeration


@QUICK
@given(small_problems())
def test_solve_finds_the_fastest_that_fits(p):
    if size(p) > MOST:
        return
    every = list(enumerated(p))
    if not every:
        with pytest.raises(ArgumentError, match=r"^pin: got"):
            solve(p)
        return
    fitting = [e.seconds for _, e in every if e.fits(p)]
    solution = solve(p)
    assert solution.evaluation == evaluate(p, solution.decisions)
    if not fitting:
        assert solution.outcome == "infeasible"
        return
    assert solution.outcome in ("unneeded", "optimal")
    assert solution.evaluation.fits(p)
    best = min(fitting)
    found = dict(enumerated(p, in_turn=False))
    assert min(e.seconds for e in found.values() if e.fits(p)) <= (
        solution.evaluation.seconds + 1e-9
    )
    assert solution.evaluation.seconds <= best * (1 + OPTIMAL_GAP) + 1e-9
    assert solution.bound_seconds <= best + 1e-9
    assert 0 <= solution.gap <= OPTIMAL_GAP


@pytest.mark.slow
@QUICK
@given(small_problems())
def test_smallest_finds_the_least_memory_and_solve_fits_it(p):
    if size(p) > MOST:
        return
    inside = [e for _, e in enumerated(p) if e.host_bytes <= p.host_bytes]
    if not inside:
        return
    least = min(e.device_bytes for e in inside)
    solution = smallest(p)
    assert solution.evaluation.device_bytes == least
    fastest = min(e.seconds for e in inside if e.device_bytes == least)
    assert solution.evaluation.seconds == pytest.approx(fastest, rel=OPTIMAL_GAP)
    at = solve(dataclasses.replace(p, device_bytes=least))
    assert at.evaluation.fits(dataclasses.replace(p, device_bytes=least))
    below = solve(dataclasses.replace(p, device_bytes=least - 1))
    assert below.outcome == "infeasible"
    assert below.evaluation.device_bytes == least


@pytest.mark.slow
@QUICK
@given(small_problems())
def test_solve_decides_within_what_is_allowed(p):
    try:
        solution = solve(p)
    except ArgumentError:
        return
    for body, chosen, again in zip(
        p.bodies, solution.decisions, solution.evaluation.recomputed, strict=True
    ):
        assert respects(body, again)
        for v, decision in zip(body.values, chosen, strict=True):
            assert decision is None or decision in v.allowed
            assert (decision == "recompute") == (v.index in again)
            if v.needed and not v.available:
                assert decision is not None


def test_a_tie_moves_and_keeps_as_little_as_it_can():
    # v1 is free to recompute, v2 costs a second; both can be hidden behind the windows.
    body = chain(
        points=(),
        operations=(
            operation(0, (0,), (1,), 0.0),
            operation(1, (1,), (2,), 1.0),
            operation(2, (2,), (3,), 0.0),
        ),
    )
    p = problem(body, device_bytes=10 * 8 * 2, host_bytes=10**6)
    solution = solve(p)
    assert solution.decisions == (("keep", "recompute", "keep", "recompute"),)
    assert solution.evaluation.host_bytes == 0


# ------------------------------------------------------------------- realistic sizes


@pytest.fixture(scope="module")
def llama():
    return h100(llama_layer(), device_bytes=80 * GIB)


def at(p, part):
    whole = evaluate(p, baselines(p)["keep all"]).device_bytes
    return dataclasses.replace(p, device_bytes=int(whole * part))


def test_unneeded_keeps_every_needed_value_and_moves_nothing(llama):
    p = at(llama, 1.0)
    solution = solve(p)
    assert solution.outcome == "unneeded"
    assert solution.evaluation.host_bytes == 0
    assert solution.evaluation.recompute_seconds == 0.0
    assert solution.gap == 0.0
    assert solution.binding == ()
    for v, decision in zip(p.bodies[0].values, solution.decisions[0], strict=True):
        assert decision == ("keep" if v.needed else None)
    tighter = dataclasses.replace(p, device_bytes=p.device_bytes - 1)
    assert solve(tighter).outcome != "unneeded"


@pytest.mark.slow
def test_more_memory_is_never_slower(llama):
    seconds = []
    for part in (0.15, 0.25, 0.4, 0.6, 1.0):
        p = at(llama, part)
        solution = solve(p)
        assert solution.evaluation.fits(p)
        seconds.append(solution.evaluation.seconds)
    for less, more in itertools.pairwise(seconds):
        assert more <= less * (1 + OPTIMAL_GAP)  # the solver may leave a gap
    assert seconds[0] > seconds[-1]


def test_never_slower_than_a_baseline_that_fits(llama):
    for part in (0.06, 0.2, 0.7):
        p = at(llama, part)
        solution = solve(p)
        rivals = [evaluate(p, d) for d in baselines(p).values()]
        assert any(e.fits(p) for e in rivals)
        for e in rivals:
            if e.fits(p):
                assert solution.evaluation.seconds <= e.seconds


def test_certificate(llama):
    p = at(llama, 0.3)
    solution = solve(p)
    assert solution.bound_seconds <= solution.evaluation.seconds
    assert "device memory in the backward pass of layer" in solution.binding
    assert "host memory" not in solution.binding
    more = GIB
    bigger = solve(dataclasses.replace(p, device_bytes=p.device_bytes + 8 * more))
    bought = solution.evaluation.seconds - bigger.evaluation.seconds
    # The relaxation is convex in the budget: a byte buys less and less.
    assert 0 < bought <= 1.5 * solution.seconds_per_byte * 8 * more
    assert "forward window of layer" in solution.binding
    faster = dataclasses.replace(
        p,
        link=dataclasses.replace(p.link, device_to_host=1.5 * p.link.device_to_host),
    )
    assert solve(faster).evaluation.seconds < solution.evaluation.seconds


def test_host_memory_binds_when_it_is_short(llama):
    p = dataclasses.replace(at(llama, 0.2), host_bytes=2 * GIB)
    solution = solve(p)
    assert solution.evaluation.host_bytes <= p.host_bytes
    assert "host memory" in solution.binding
    wider = dataclasses.replace(p, host_bytes=6 * GIB)
    assert solve(wider).evaluation.seconds < solution.evaluation.seconds


def test_infeasible_returns_the_smallest_plan(llama):
    least = smallest(llama)
    p = dataclasses.replace(llama, device_bytes=least.evaluation.device_bytes - 1)
    solution = solve(p)
    assert solution.outcome == "infeasible"
    assert solution.binding == ("device memory",)
    assert solution.evaluation.device_bytes == least.evaluation.device_bytes
    assert least.outcome == "optimal"
    vast = smallest(dataclasses.replace(llama, device_bytes=10**15))
    assert vast.evaluation.device_bytes == least.evaluation.device_bytes
    rivals = [evaluate(p, d).device_bytes for d in baselines(p).values()]
    assert least.evaluation.device_bytes <= min(rivals)


def test_several_bodies_share_one_budget():
    encoder = llama_layer(8, name="encoder")
    decoder = llama_layer(8, name="decoder", cross=True)
    p = at(h100(encoder, decoder, device_bytes=GIB), 0.5)
    both = solve(p)
    assert both.evaluation.fits(p)
    whole = p.device_bytes
    apart = [
        solve(h100(body, device_bytes=whole // 2)).evaluation
        for body in (encoder, decoder)
    ]
    # Halves of the budget for each body alone are one way to share it: no better, but
    # for the reload that each of the two waits for and the pair only once.
    assert both.evaluation.seconds <= sum(e.seconds for e in apart)


def test_the_matrix_does_not_grow_with_the_number_of_layers():
    def shape(count):
        p = h100(llama_layer(count), device_bytes=count * GIB)
        return build(p, tables(p)).matrix.shape

    assert shape(40) == shape(400)
