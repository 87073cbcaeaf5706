"""What compilers need beyond predictions, learned from the programs compiled so far."""

import types

import pytest

from planner_problems import GIB, chain
from stowax._search._forecast import Forecast

COUNT, BYTES = 10, GIB // 10  # each value: 1 GiB over all layers
KEEP_1 = (("keep", "keep", "recompute", "recompute"),)
KEEP_2 = (("keep", "recompute", "keep", "recompute"),)
KEEP_12 = (("keep", "keep", "keep", "recompute"),)
OFFLOAD = (("offload", "recompute", "recompute", "recompute"),)
PREDICTED = {KEEP_1: 12, KEEP_2: 12, KEEP_12: 13, OFFLOAD: 11}


def forecast():
    """A forecast of programs of about 20 GiB, predicted as in `PREDICTED`."""
    survey = types.SimpleNamespace(bodies=(chain(COUNT, bytes=BYTES),))
    return Forecast(
        survey=survey,
        scale=20 * GIB,
        predictions={d: (gib * GIB, 0) for d, gib in PREDICTED.items()},
    )


def test_nothing_compiled_means_the_prediction_as_it_is():
    f = forecast()
    assert f.excess(KEEP_1) == 0
    assert f.expected(KEEP_1) == f.known(KEEP_1, 0.0) == 12 * GIB
    assert f.spread(KEEP_1) > 0


def test_a_compiled_program_is_known_and_foretells_its_like():
    f = forecast()
    f.learn(KEEP_1, 13 * GIB)
    assert f.known(KEEP_1, 2.0) == 13 * GIB
    # Most of an excess is taken for one of every program, not all of it.
    assert 12.5 * GIB < f.expected(KEEP_12) - GIB < 13 * GIB
    assert f.excess(OFFLOAD) < f.excess(KEEP_12)  # less alike, less to learn from


def test_the_corrected_prediction_of_a_compiled_program_is_near_the_truth():
    f = forecast()
    f.learn(KEEP_1, 14 * GIB)
    assert f.expected(KEEP_1) == pytest.approx(14 * GIB, rel=0.03)
    f.learn(KEEP_2, 13 * GIB)
    assert f.expected(KEEP_1) == pytest.approx(14 * GIB, rel=0.05)
    assert f.expected(KEEP_2) == pytest.approx(13 * GIB, rel=0.05)


def test_an_excess_is_laid_to_the_value_that_tells_programs_apart():
    f = forecast()
    f.learn(KEEP_1, 12 * GIB)
    f.learn(KEEP_12, 15 * GIB)  # 2 GiB more than predicted: value 2's doing
    assert f.excess(KEEP_2) > 0.5 * GIB
    assert f.excess(OFFLOAD) < f.excess(KEEP_2)


def test_what_large_programs_save_a_small_one_does_not_have():
    f = forecast()
    small = (("recompute", "recompute", "recompute", "recompute"),)
    f.predictions[small] = 2 * GIB, 0
    f.learn(KEEP_1, 9 * GIB)  # three quarters of what was predicted
    assert f.credible(small) == 1.5 * GIB
    assert f.credible(KEEP_2) == f.expected(KEEP_2) < 10 * GIB  # its like do save
    assert f.credible(KEEP_1) == 9 * GIB


def test_what_is_known_makes_surer():
    f = forecast()
    before = f.spread(KEEP_12)
    f.learn(KEEP_1, 12 * GIB)
    between = f.spread(KEEP_12)
    f.learn(KEEP_2, 12 * GIB)
    assert before > between > f.spread(KEEP_12) > 0


@pytest.mark.parametrize("caution", [0.0, 0.5, 2.0])
def test_caution_adds_standard_deviations(caution):
    f = forecast()
    f.learn(KEEP_1, 13 * GIB)
    wanted = f.expected(KEEP_2) + caution * f.spread(KEEP_2)
    assert f.known(KEEP_2, caution) == pytest.approx(wanted, abs=1)
