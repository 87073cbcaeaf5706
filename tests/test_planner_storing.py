"""The planner where storing takes the device's time: bandwidth is not free."""

import pytest

from planner_problems import chain, problem, replaced
from stowax._planner import evaluate, solve


def storing(body, seconds_per_byte):
    """`body`, in which keeping takes time, and offloading twice as much."""
    for v in body.values:
        keep = seconds_per_byte * v.bytes
        body = replaced(body, v.index, keep_seconds=keep, offload_seconds=2 * keep)
    return body


def test_storing_is_paid_for_in_symbols():
    count, b, rate = 10, 8, 0.25
    p = problem(storing(chain(count, bytes=b), rate))
    e = evaluate(p, (("offload", "keep", "recompute", None),))
    free = evaluate(
        problem(chain(count, bytes=b)), (("offload", "keep", "recompute", None),)
    )
    assert e.seconds - free.seconds == pytest.approx(count * 3 * rate * b)


def test_what_is_cheaper_to_compute_again_is_not_kept_even_where_it_fits():
    # Keeping takes 2 s a value and layer, computing again 1 s; the input must be kept.
    p = problem(storing(chain(bytes=8), 0.25))
    solution = solve(p)
    assert solution.outcome == "optimal"
    assert solution.decisions == (("keep", "recompute", "recompute", "recompute"),)
    assert solve(problem(chain(bytes=8))).outcome == "unneeded"
