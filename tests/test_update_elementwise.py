"""What is called elementwise is: of parts of the operands it makes parts of the result.

The update's search and its proof both rest on this list.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stowax._jaxprs._elementwise import ELEMENTWISE

OPERANDS = {
    "and": "bool",
    "or": "bool",
    "not": "bool",
    "xor": "bool",
    "shift_left": "int32",
    "shift_right_arithmetic": "int32",
    "shift_right_logical": "int32",
    "population_count": "int32",
    "real": "complex64",
    "imag": "complex64",
}
PARAMS = {
    "convert_element_type": {
        "new_dtype": np.dtype("bfloat16"),
        "weak_type": False,
        "sharding": None,
    },
    "integer_pow": {"y": 3},
    "reduce_precision": {"exponent_bits": 5, "mantissa_bits": 10},
    "round": {"rounding_method": jax.lax.RoundingMethod.TO_NEAREST_EVEN},
    "name": {"name": "x"},
    **{k: {"accuracy": None} for k in ("cbrt", "cos", "exp", "exp2", "expm1", "log")},
    **{k: {"accuracy": None} for k in ("log1p", "logistic", "rsqrt", "sin", "sqrt")},
    **{k: {"accuracy": None} for k in ("tan", "tanh")},
}
COUNTS = {
    2: "add add_any and atan2 div eq ge gt igamma igammac le lt max min mul ne "
    "nextafter or pow rem shift_left shift_right_arithmetic shift_right_logical sub "
    "xor",
    3: "clamp select_n",
}


def primitives() -> dict[str, Any]:
    """The primitives of the list that this version of JAX has, by name."""
    from jax._src import ad_checkpoint, ad_util, core, lax

    found: dict[str, Any] = {}
    for module in (lax.lax, lax.special, ad_util, ad_checkpoint):
        for value in vars(module).values():
            if isinstance(value, core.Primitive):
                found[value.name] = value
    return {name: found[name] for name in sorted(ELEMENTWISE & found.keys())}


@pytest.mark.slow
def test_what_is_called_elementwise_is():
    """Of parts of the operands it makes the same parts of the result."""
    rng = np.random.default_rng(0)
    names = primitives()
    assert len(names) > 60
    for name, primitive in names.items():
        dtype = OPERANDS.get(name, "float32")
        count = next((n for n, own in COUNTS.items() if name in own.split()), 1)
        operands = [
            jnp.asarray((rng.uniform(0.1, 0.9, (4, 6)) * 7 % 1).astype(dtype))
            for _ in range(count)
        ]
        if name == "select_n":
            operands[0] = operands[0] > 0.5
        params = PARAMS.get(name, {})
        whole = np.asarray(primitive.bind(*operands, **params))
        for k in range(4):
            rows = [operand[k : k + 1, 2:] for operand in operands]
            part = np.asarray(primitive.bind(*rows, **params))
            np.testing.assert_allclose(
                part.astype(whole.dtype), whole[k : k + 1, 2:], rtol=1e-6, err_msg=name
            )
