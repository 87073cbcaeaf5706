"""How much a program multiplies, and how long that takes at the chip's own rates."""

import jax
import jax.numpy as jnp
import pytest

import stowax
from stowax._hardware._hardware import CHIPS
from stowax._inspect._products import nominal_seconds


def test_products_of_two_types_each_at_its_own_rate():
    rows, trips = 512, 3

    def step(x, y):
        x, _ = jax.lax.scan(lambda x, _: (x @ x, None), x, None, length=trips)
        return x, y @ y

    shapes = [jax.ShapeDtypeStruct((rows, rows), t) for t in (jnp.bfloat16, "float32")]
    found = stowax.inspect(jax.jit(step), *shapes, target="h200")
    product = 2 * rows**3
    assert found.flops == (trips + 1) * product
    chip = CHIPS["h200"]
    expected = trips * product / chip.matrix_rate("bfloat16")
    expected += product / chip.matrix_rate("float32")
    assert found.nominal_seconds == pytest.approx(expected)


@pytest.mark.parametrize(
    ("chip", "products"),
    [
        ("cpu", {"float32": 1e9}),  # an assumed rate
        ("h200", {"bfloat16": 1e9, "float1024": 1e9}),  # no rate for one of them
    ],
)
def test_what_is_not_known_is_not_divided_by(chip, products):
    assert nominal_seconds(products, CHIPS[chip]) == 0
