"""A mixture of experts in the shape of Mixtral 8x7B, fully sharded over a mesh (FSDP).

Llama's attention with grouped heads; its feed-forward eight times over, of which each
token goes through the two that a router picks. Experts have room for a fixed number of
a sequence's tokens, a quarter more than they would get evenly; what is beyond that
passes by the layer (GShard's dispatch by products, which every partitioner can cut).

>>> step, args = mixtral_8x7b(stowax.target("v5p-16"), weights=jnp.bfloat16)

Sizes: Jiang et al., "Mixtral of Experts" (2024), table 1.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

import stowax
from benchmarks.models import _fsdp, _layers, _named, scan_transformer
from benchmarks.models._fsdp import Step


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config(scan_transformer.Config):
    """The sizes of `scan_transformer`, and of the experts."""

    experts: int = 8
    chosen: int = 2
    room: float = 1.25

    @property
    def capacity(self) -> int:
        """Tokens of a sequence that one expert has room for."""
        return math.ceil(self.room * self.sequence * self.chosen / self.experts)


MIXTRAL_8X7B = Config(
    layers=32,
    width=4096,
    heads=32,
    key_value_heads=8,
    feed_forward=14_336,
    vocabulary=32_000,
    sequence=2048,
    batch=16,
)
SMALL = Config(
    layers=3,
    width=32,
    heads=4,
    key_value_heads=2,
    feed_forward=64,
    vocabulary=50,
    sequence=16,
    batch=4,
    experts=4,
    compute=jnp.float32,
    learning_rate=1e-2,
)


def initial_parameters(config: Config, key: Array) -> dict[str, Any]:
    """Float32 parameters: `scan_transformer`'s, its feed-forward in experts."""
    c = config
    below, *keys = jax.random.split(key, 5)
    one = dataclasses.replace(c, feed_forward=1)  # attention, embedding and head
    parameters = scan_transformer.initial_parameters(one, below)
    into = (c.layers, c.experts, c.width, c.feed_forward)
    out = (c.layers, c.experts, c.feed_forward, c.width)
    parameters["layers"] |= {
        "router": _layers.normal(keys[0], (c.layers, c.width, c.experts), c.width),
        "gate": _layers.normal(keys[1], into, c.width),
        "up": _layers.normal(keys[2], into, c.width),
        "down": _layers.normal(keys[3], out, c.feed_forward),
    }
    return parameters


def routed(config: Config, router: Array, x: Array) -> Array:
    """Weights [b s x c] with which tokens of `x` [b s d] enter the experts' places.

    Zero everywhere but in the place of a token's chosen experts.
    """
    scores = (x @ router.astype(x.dtype)).astype(jnp.float32)
    top, index = jax.lax.top_k(scores, config.chosen)
    share = jax.nn.softmax(top, axis=-1)
    wanted = jax.nn.one_hot(index, config.experts, dtype=jnp.float32)  # [b s k x]
    batch, length, chosen, experts = wanted.shape
    # First choices of all tokens go before second ones.
    order = wanted.transpose(0, 2, 1, 3).reshape(batch, chosen * length, experts)
    place = (jnp.cumsum(order, axis=1) - 1.0) * order
    place = place.reshape(batch, chosen, length, experts).transpose(0, 2, 1, 3)
    place = jnp.sum(place * wanted, axis=-1).astype(jnp.int32)  # [b s k]
    places = jax.nn.one_hot(place, config.capacity, dtype=jnp.float32)
    return jnp.einsum("bsk,bskx,bskc->bsxc", share, wanted, places)


def mixed_experts(config: Config, weights: dict[str, Array], x: Array) -> Array:
    """The normed `x` [b s d] through its experts."""
    entering = routed(config, weights["router"], x)
    combine = entering.astype(x.dtype)
    dispatch = jax.lax.stop_gradient((entering > 0.0).astype(x.dtype))
    inner = jnp.einsum("bsxc,bsd->bxcd", dispatch, x)

    def product(name: str, x: Array) -> Array:
        return jnp.einsum("bxci,xio->bxco", x, weights[name].astype(x.dtype))

    gate = checkpoint_name(product("gate", inner), "mlpwi_0")
    up = checkpoint_name(product("up", inner), "mlpwi_1")
    out = checkpoint_name(product("down", jax.nn.silu(gate) * up), "mlpwo")
    return jnp.einsum("bsxc,bxcd->bsd", combine, out)


def layer(
    config: Config,
    weights: dict[str, Array],
    x: Array,
    table: tuple[Array, Array],
    mask: Array,
) -> Array:
    """One layer on `x` [b s d]."""
    x = _named.layer_input(x)
    normed = _layers.rms_norm(x, weights["attention_norm"])
    query, key, value = _named.query_key_value(weights, normed, table)
    mixed = _layers.attention(query, key, value, mask)
    x = x + _named.joined(mixed, weights["output"])
    normed = _layers.rms_norm(x, weights["feed_forward_norm"])
    return x + mixed_experts(config, weights, normed)


def make_step(config: Config, mesh: Mesh, *, policy: Any = None) -> Step:
    """The training step `(state, batch) -> (state, metrics)` on `mesh`."""
    constrain = _fsdp.along_batch(mesh)

    @stowax.stow
    def loss_fn(parameters: dict[str, Any], batch: dict[str, Array]) -> Array:
        inputs = batch["inputs"]
        table = _layers.rotary_table(inputs.shape[1], config.head_width)
        mask = _layers.causal_mask(inputs.shape[1])
        x = constrain(parameters["embedding"][inputs].astype(config.compute))
        x = _named.scan_layers(
            lambda x, weights: constrain(layer(config, weights, x, table, mask)),
            x,
            parameters["layers"],
            policy,
        )
        x = _layers.rms_norm(x, parameters["norm"])
        logits = x @ parameters["head"].astype(x.dtype)
        return jnp.mean(_layers.cross_entropy(logits, batch["labels"]))

    return _fsdp.make_step(loss_fn, scan_transformer.optimizer(config), mesh)


def mixtral_8x7b(
    target: Any,
    *,
    policy: Any = None,
    weights: jax.typing.DTypeLike = jnp.float32,
    **sizes: Any,
) -> tuple[Step, tuple[Any, ...]]:
    """Step and sharded specs of Mixtral 8x7B; options as in `gemma2.on_target`."""
    config = dataclasses.replace(MIXTRAL_8X7B, **sizes)
    mesh = _fsdp.mesh_of(target, config.batch)
    specs = _fsdp.specs_of(
        mesh,
        lambda: initial_parameters(config, jax.random.key(0)),
        lambda: scan_transformer.random_batch(config),
        optimizer=scan_transformer.optimizer(config),
        weights=weights,
    )
    return make_step(config, mesh, policy=policy), specs


def small() -> tuple[Step, tuple[Any, ...]]:
    """Step and real arrays on one attached device, for numerics on a CPU."""
    parameters = initial_parameters(SMALL, jax.random.key(0))
    moments = scan_transformer.optimizer(SMALL).init(parameters)
    mesh = Mesh(jax.devices()[:1], (_fsdp.AXIS,))
    state = {"parameters": parameters, "optimizer": moments}
    return make_step(SMALL, mesh), (state, scan_transformer.random_batch(SMALL))
