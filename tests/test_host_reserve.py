"""`host_reserve`: host memory that is others', as plans heed it and name it."""

import jax
import jax.numpy as jnp
import pytest

import stowax
from planned_models import MIB, plan, spec
from stowax._errors import ArgumentError

ROWS, COLUMNS = 2048, 1024
MOMENT = ROWS * COLUMNS * 4
OFFLOAD = {"optimizer state": "offload"}
assert MOMENT == 8 * MIB


def step(w, moment, x):
    """Gradient descent with momentum."""
    loss, gradient = jax.value_and_grad(lambda w: jnp.sum(jnp.tanh(w * x)))(w)
    moment = 0.9 * moment + gradient
    return w - 0.01 * moment, moment, loss


ARGS = spec(ROWS, COLUMNS), spec(ROWS, COLUMNS), spec()


def refusal(found):
    with pytest.warns(UserWarning, match="does not fit") as caught:
        found.apply(step)
    return str(caught[0].message)


def words(found):
    return " ".join(str(found).split())


def test_what_is_in_reserve_is_no_plans(tmp_path):
    found = plan(step, *ARGS, pin=OFFLOAD, host_budget="32MiB", host_reserve="16MiB")
    assert found.fits
    assert found.host_bytes == MOMENT
    assert found.proof.host_budget_bytes == 16 * MIB
    assert found.proof.host_reserve_bytes == 16 * MIB
    assert "reserve" not in words(found)  # it is not in the way
    found.save(tmp_path / "plan.json")
    again = stowax.load_plan(tmp_path / "plan.json")
    assert again.proof.host_reserve_bytes == 16 * MIB


@pytest.mark.slow
def test_it_comes_off_what_the_target_has():
    whole = plan(step, *ARGS)
    assert whole.proof.host_reserve_bytes == 0
    less = plan(step, *ARGS, host_reserve="20GiB")
    left = whole.proof.host_budget_bytes - less.proof.host_budget_bytes
    assert left == less.proof.host_reserve_bytes == 20 * 2**30
    for nothing in (0, "0", "0GiB", "0.0 MiB"):
        assert plan(step, *ARGS, host_reserve=nothing).proof == whole.proof


def test_a_plan_that_the_reserve_leaves_no_room_for_names_it():
    kept = {"host_budget": MOMENT, "host_reserve": MOMENT // 2}
    stays = plan(step, *ARGS, budget="1MiB", **kept)
    assert not stays.fits
    assert stays.host_bytes == 0
    note = "host_reserve keeps 4.00 MiB of the host's memory per device for others, and"
    assert f"{note} plans may take the other 4.00 MiB" in words(stays)
    assert (
        "plan: it does not fit 1.00 MiB of the device and 4.00 MiB of the host beside "
        "the 4.00 MiB of host_reserve.\nIts program takes "
    ) in refusal(stays)


@pytest.mark.slow
def test_a_pin_that_the_reserve_leaves_no_room_for():
    kept = {"host_budget": MOMENT, "host_reserve": MOMENT // 2}
    pinned = plan(step, *ARGS, pin=OFFLOAD, **kept)
    assert not pinned.fits
    assert "host budget 4.00 MiB beside 4.00 MiB in reserve." in words(pinned)
    first, takes, instead = refusal(pinned).splitlines()
    beside = "4.00 MiB of the host beside the 4.00 MiB of host_reserve"
    assert first == f"plan: it does not fit {beside}."
    assert takes.endswith(" and 8.00 MiB of the host.")
    assert instead == (
        "Give a larger host_budget or a smaller host_reserve, or pin less to 'offload'."
    )


def test_a_reserve_that_leaves_nothing():
    instead = (
        ". Write less, per device; to leave the host alone write forbid=('offload',)."
    )
    with pytest.raises(ArgumentError) as caught:
        plan(step, *ARGS, host_budget="20GiB", host_reserve="20GiB")
    assert str(caught.value) == (
        f"host_reserve: got '20GiB', all of the 20.0 GiB of host_budget{instead}"
    )
    with pytest.raises(ArgumentError) as caught:
        plan(step, *ARGS, host_reserve=1 << 50)
    message = str(caught.value)
    assert message.startswith("host_reserve: got 1125899906842624, all of the ")
    assert message.endswith(f" GiB that a device of h200 has of its host{instead}")


def test_steps_under_a_plan_take_it_too():
    planned = stowax.jit(step, target="h200", host_reserve="1GiB", cache=False)
    assert planned.lower(*ARGS) is not None
    assert planned.plan.proof.host_reserve_bytes == 2**30
