"""Parts of decoder layers whose values carry the names that published policies use.

The names and their places are MaxText's: query and key after the rotary embedding, the
two inner products of the feed-forward before the activation. A policy by names is
`save_only_these_names("query_proj", ...)`; a value without its name would be recomputed
in silence. Axes as in `_layers`.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from benchmarks.models import _layers

Weights = dict[str, Array]

LAYER_INPUT = "decoder_layer_input"
ATTENTION = ("query_proj", "key_proj", "value_proj", "qkv_proj", "out_proj")
FEED_FORWARD = ("mlpwi", "mlpwi_0", "mlpwi_1", "mlpwo")


def layer_input(x: Array) -> Array:
    """`x`, named as what a layer starts from."""
    return checkpoint_name(x, LAYER_INPUT)


def query_key_value(
    weights: Weights,
    x: Array,
    table: tuple[Array, Array],
    *,
    scale: float | None = None,
) -> tuple[Array, Array, Array]:
    """Query, key and value [b s h e] of the normed `x`; `scale` is of the query."""
    query = _layers.rotate(_layers.split_heads(x, weights["query"]), table)
    key = _layers.rotate(_layers.split_heads(x, weights["key"]), table)
    value = _layers.split_heads(x, weights["value"])
    if scale is not None:
        query = query * scale
    return (
        checkpoint_name(query, "query_proj"),
        checkpoint_name(key, "key_proj"),
        checkpoint_name(value, "value_proj"),
    )


def joined(x: Array, weight: Array) -> Array:
    """The output projection of attention's heads."""
    return checkpoint_name(_layers.join_heads(x, weight), "out_proj")


def gated(
    weights: Weights, x: Array, activation: Callable[[Array], Array] = jax.nn.silu
) -> Array:
    """Gated feed-forward of the normed `x`."""
    gate = checkpoint_name(x @ weights["gate"].astype(x.dtype), "mlpwi_0")
    up = checkpoint_name(x @ weights["up"].astype(x.dtype), "mlpwi_1")
    return checkpoint_name(
        (activation(gate) * up) @ weights["down"].astype(x.dtype), "mlpwo"
    )


def scan_layers(
    body: Callable[[Array, Any], Array], x: Array, weights: Any, policy: Any = None
) -> Array:
    """`body(x, weights of a layer)` layer after layer, under `lax.scan`.

    With a `policy` every layer is under `jax.checkpoint`; without there is none of it,
    as in a script that leaves it to stowax. Within a scan nothing has to be kept from
    being shared, so `prevent_cse` is off, as MaxText has it.
    """

    def step(x: Array, layer: Any) -> tuple[Array, None]:
        return body(x, layer), None

    if policy is not None:
        step = jax.checkpoint(step, policy=policy, prevent_cse=False)
    x, _ = jax.lax.scan(step, x, weights)
    return x
