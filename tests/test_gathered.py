"""Products that gather their operands, for plans on many chips."""

import functools

import jax
import jax.numpy as jnp
import pytest

import stowax
from planned_models import QUICK, plan, spec, specs, train, weights

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("usual_promotion")]

LAYERS, WIDTH, ROWS = 4, 1024, 8192
AGAIN = {"dot_general*": "recompute"}


@functools.cache
def target():
    return stowax.target("v5e-16")


def arguments():
    """Weights and rows, each spread over all chips."""
    mesh = target().mesh((target().device_count,), ("data",))

    def on(leaf, *axes):
        return leaf.update(sharding=target().sharding(*axes, mesh=mesh))

    halves = weights(LAYERS, WIDTH, dtype=jnp.bfloat16)
    params = {name: on(leaf, None, "data") for name, leaf in halves.items()}
    return params, on(spec(ROWS, WIDTH, dtype=jnp.bfloat16), "data")


def loops_of_products(compiled):
    """How often XLA's name for a product that became a loop stands in a program."""
    (module,) = compiled.hlo_module_protos()
    return module.count(b"windowed_dot_general")


def test_products_stay_whole_under_a_plan():
    usual = target().compile(jax.jit(train), *arguments(), compiler_options=QUICK)
    assert loops_of_products(usual) > 0  # or else the option has lost its reason
    found = plan(train, *arguments(), target="v5e-16", pin=AGAIN)
    assert found.fits
    assert found.host_bytes == 0
    planned = target().compile(found.apply(train), *specs(found, *arguments()))
    assert loops_of_products(planned) == 0


def test_what_the_user_tells_the_compiler_goes_first():
    by_itself = plan(train, *arguments(), target="v5e-16", pin=AGAIN)
    (name,) = (option for option in by_itself.compiler_options if "einsum" in option)
    mine = {name: "0"}
    found = plan(train, *arguments(), target="v5e-16", pin=AGAIN, compiler_options=mine)
    assert found.compiler_options == {**by_itself.compiler_options, **mine}
    planned = target().compile(found.apply(train), *specs(found, *arguments()))
    assert loops_of_products(planned) > 0
