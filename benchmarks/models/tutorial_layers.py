"""JAX's host-offloading tutorial, its first two examples: ten layers of two products.

To the letter of the page, sizes included: 256 × 256 inputs, weights of 256 × 1024 and
back, float32, gradients of the sum with respect to the weights. `hybrid_layer` is the
page's recipe for weights in host memory; `adam_tutorial` is its third example.

>>> step, args = whole()
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

import stowax

NAME = "x"
"""What the page calls a layer's input; its policy offloads that."""


def layer(x: Array, w: tuple[Array, Array]) -> tuple[Array, None]:
    """Two products."""
    w1, w2 = w
    x = checkpoint_name(x, NAME)
    y = x @ w1
    return y @ w2, None


def hybrid_layer(x: Array, w: tuple[Array, Array]) -> tuple[Array, None]:
    """The same, its weights fetched from host memory."""
    w = jax.tree.map(lambda leaf: jax.device_put(leaf, jax.memory.Space.Device), w)
    return layer(x, w)


def make_step(policy: Any = None, body: Any = layer) -> Any:
    """The page's gradient function, every layer under `policy` if there is one."""
    if policy is not None:
        body = jax.remat(body, policy=policy, prevent_cse=False)

    @stowax.stow
    def scanned(w: tuple[Array, Array], x: Array) -> Array:
        result, _ = jax.lax.scan(body, x, w)
        return jnp.sum(result)

    return jax.grad(scanned)


def arguments() -> tuple[Any, ...]:
    """Specs of the weights and the input."""
    spec = jax.ShapeDtypeStruct
    weights = (
        spec((10, 256, 1024), jnp.float32),
        spec((10, 1024, 256), jnp.float32),
    )
    return weights, spec((256, 256), jnp.float32)


def whole(target: Any = None, policy: Any = None) -> tuple[Any, tuple[Any, ...]]:
    """Step and specs for one device of `target`."""
    del target  # without shardings, arguments are for one device of any machine
    return make_step(policy), arguments()
