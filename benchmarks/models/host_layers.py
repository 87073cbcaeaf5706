"""Sixteen layers of two products, (4096, 16384) and back, in bfloat16.

4 GiB of weights, and as much of gradients. Three ways to write the same layers: a scan
over the weights' first axis, a scan over their second, a Python loop.
"""

from typing import Any

import jax
import jax.numpy as jnp

LAYERS, WIDTH, HIDDEN, ROWS = 16, 4096, 16384, 256


def _layer(x: Any, weights: Any) -> Any:
    up, down = weights
    return (x @ up) @ down


def _scan(weights: Any, x: Any) -> Any:
    return jax.lax.scan(lambda x, w: (_layer(x, w), None), x, weights)[0]


def _scan_axis_1(weights: Any, x: Any) -> Any:
    return _scan([jnp.moveaxis(w, 1, 0) for w in weights], x)


def _loop(weights: Any, x: Any) -> Any:
    for w in zip(*weights, strict=True):
        x = _layer(x, w)
    return x


FORMS = {"scan": _scan, "scan, axis 1": _scan_axis_1, "loop": _loop}


def specs_of(
    form: str,
    layers: int = LAYERS,
    width: int = WIDTH,
    hidden: int = HIDDEN,
    rows: int = ROWS,
) -> tuple[Any, Any]:
    """Types of the step's weights and input."""
    shapes = (width, hidden), (hidden, width)
    x = jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)
    if form == "loop":
        matrix = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes]
        return [[m] * layers for m in matrix], x
    axis = FORMS[form] is _scan_axis_1
    return [
        jax.ShapeDtypeStruct((*s[:axis], layers, *s[axis:]), jnp.bfloat16)
        for s in shapes
    ], x
