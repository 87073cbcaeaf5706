"""`compiles=`: how many programs a plan may take, and what more are good for."""

import pytest

from planned_models import arguments, plan, train
from stowax._errors import ArgumentError


@pytest.mark.parametrize("wrong", [3, 4.5, "8", True])
def test_how_many_may_be_compiled_is_a_number_from_four_on(wrong):
    with pytest.raises(ArgumentError) as caught:
        plan(train, *arguments(), compiles=wrong)
    assert str(caught.value) == (
        f"compiles: got {wrong!r}. Write how many programs may be compiled, 4 or more."
    )


@pytest.mark.slow
def test_a_plan_improves_or_stays():
    budget = "130MiB"
    usual = plan(train, *arguments(), budget=budget)
    found = plan(train, *arguments(), budget=budget, compiles=7)
    assert found.fits
    assert found.step_seconds <= usual.step_seconds
    assert len(usual.search.trials) <= len(found.search.trials) <= 7
    assert found.step_seconds == min(
        t.step_seconds
        for t in found.search.trials
        if t.compiled_bytes <= found.budget_bytes
    )


@pytest.mark.slow
def test_a_step_that_fits_is_planned_where_that_is_faster():
    # Kept are 5 arrays a layer of 4 × its input, of which one has to be: the product.
    wide = arguments(width=1024, rows=32768)
    found = plan(train, *wide)
    written = found.search.trials[0]
    assert written.what == "as written"
    assert found.fits
    assert found.outcome in ("optimal", "feasible")
    assert (
        found.program.donate_argnums == ()
    )  # nobody has to give up its arguments for that
    assert found.step_seconds < 0.8 * written.step_seconds
    assert found.device_bytes < 0.5 * written.compiled_bytes
    longer = plan(train, *wide, compiles=5)
    assert longer.step_seconds <= found.step_seconds
