"""Gemma 2 at its published sizes, fully sharded over a mesh (FSDP).

What it has beyond Llama: layers in pairs, the first of which attends to a sliding
window and the second to everything; norms before and after both halves of a layer;
scores and logits bent by a hyperbolic tangent; a gated feed-forward with GELU; heads
wider than the width over their number; and an output head that is the embedding, of
256 thousand words. Layers run pair by pair under `lax.scan`, as MaxText runs them.

>>> step, args = gemma2_27b(stowax.target("v5p-8"), weights=jnp.bfloat16)

Sizes: Gemma Team, "Gemma 2: Improving Open Language Models at a Practical Size" (2024),
table 1, and the configuration files published with the weights.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import Mesh

import stowax
from benchmarks.models import _fsdp, _layers, _named
from benchmarks.models._fsdp import Step

SCORES_CAP, LOGITS_CAP = 50.0, 30.0
KINDS = ("local", "global")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Sizes of the model and of its batch; `compute` is the dtype of activations.

    `per_query` is what the query is divided by the root of: the head's width, or in the
    largest model the width over the number of heads.
    """

    layers: int
    width: int
    heads: int
    key_value_heads: int
    head_width: int
    feed_forward: int
    per_query: int
    vocabulary: int = 256_128
    window: int = 4096
    sequence: int = 4096
    batch: int = 8
    compute: jax.typing.DTypeLike = jnp.bfloat16
    learning_rate: float = 1e-3


GEMMA2_2B = Config(
    layers=26,
    width=2304,
    heads=8,
    key_value_heads=4,
    head_width=256,
    feed_forward=9216,
    per_query=256,
)
GEMMA2_9B = Config(
    layers=42,
    width=3584,
    heads=16,
    key_value_heads=8,
    head_width=256,
    feed_forward=14_336,
    per_query=256,
)
GEMMA2_27B = Config(
    layers=46,
    width=4608,
    heads=32,
    key_value_heads=16,
    head_width=128,
    feed_forward=36_864,
    per_query=144,
)
SMALL = Config(
    layers=4,
    width=32,
    heads=4,
    key_value_heads=2,
    head_width=16,
    feed_forward=64,
    per_query=16,
    vocabulary=50,
    window=8,
    sequence=16,
    batch=4,
    compute=jnp.float32,
    learning_rate=1e-2,
)


def initial_layers(config: Config, key: Array) -> dict[str, dict[str, Array]]:
    """Float32 weights of all layers: local and global ones, pairs on a leading axis.

    Norms hold what is added to one.
    """
    c, pairs = config, config.layers // 2
    norms = ("attention_norm", "attention_post_norm")
    norms += ("feed_forward_norm", "feed_forward_post_norm")
    shapes = {
        "query": ((c.width, c.heads, c.head_width), c.width),
        "key": ((c.width, c.key_value_heads, c.head_width), c.width),
        "value": ((c.width, c.key_value_heads, c.head_width), c.width),
        "output": ((c.heads, c.head_width, c.width), c.heads * c.head_width),
        "gate": ((c.width, c.feed_forward), c.width),
        "up": ((c.width, c.feed_forward), c.width),
        "down": ((c.feed_forward, c.width), c.feed_forward),
    }

    def one_kind(key: Array) -> dict[str, Array]:
        keys = jax.random.split(key, len(shapes))
        return {
            name: _layers.normal(k, (pairs, *shape), inputs)
            for k, (name, (shape, inputs)) in zip(keys, shapes.items(), strict=True)
        } | {name: jnp.zeros((pairs, c.width), jnp.float32) for name in norms}

    keys = jax.random.split(key, len(KINDS))
    return {kind: one_kind(k) for kind, k in zip(KINDS, keys, strict=True)}


def initial_parameters(config: Config, key: Array) -> dict[str, Any]:
    """Float32 parameters."""
    below, above = jax.random.split(key)
    embedding = (config.vocabulary, config.width)
    return {
        "embedding": _layers.normal(below, embedding, config.width),
        "layers": initial_layers(config, above),
        "norm": jnp.zeros((config.width,), jnp.float32),
    }


def norm(x: Array, scale: Array) -> Array:
    """Root-mean-square norm, times one plus `scale`."""
    return _layers.rms_norm(x, 1.0 + scale.astype(jnp.float32))


def layer(
    config: Config,
    weights: dict[str, Array],
    x: Array,
    table: tuple[Array, Array],
    mask: Array,
) -> Array:
    """One layer on `x` [b s d]; the mask [b q k] makes it local or global."""
    x = _named.layer_input(x)
    query, key, value = _named.query_key_value(
        weights,
        norm(x, weights["attention_norm"]),
        table,
        scale=1.0 / math.sqrt(config.per_query),
    )
    mixed = _layers.attention(query, key, value, mask, scale=1.0, cap=SCORES_CAP)
    mixed = _named.joined(mixed, weights["output"])
    x = x + norm(mixed, weights["attention_post_norm"])
    gelu = functools.partial(jax.nn.gelu, approximate=True)
    fed = _named.gated(weights, norm(x, weights["feed_forward_norm"]), gelu)
    return x + norm(fed, weights["feed_forward_post_norm"])


def run_layers(
    config: Config,
    layers: dict[str, dict[str, Array]],
    x: Array,
    masks: dict[str, Array],
    constrain: Any,
    policy: Any,
) -> Array:
    """All pairs of layers on `x`; `masks` has one for each kind of layer."""
    table = _layers.rotary_table(x.shape[1], config.head_width)

    def pair(x: Array, weights: dict[str, dict[str, Array]]) -> Array:
        for kind in KINDS:
            x = constrain(layer(config, weights[kind], x, table, masks[kind]))
        return x

    return _named.scan_layers(pair, x, layers, policy)


def masks(config: Config, length: int) -> dict[str, Array]:
    """Boolean [1 q k] per kind of layer: what a token attends to."""
    everything = _layers.causal_mask(length)
    position = jnp.arange(length, dtype=jnp.int32)
    near = position[:, None] - position[None, :] < config.window
    return {"local": everything & near[None, :, :], "global": everything}


def embedded(config: Config, embedding: Array, inputs: Array) -> Array:
    """Embedded tokens [b s d], scaled by the root of the width."""
    x = embedding[inputs].astype(config.compute)
    return x * jnp.asarray(math.sqrt(config.width), config.compute)


def logits(embedding: Array, x: Array) -> Array:
    """Logits [b s v] in float32 of the normed `x`, by the embedding itself."""
    found = jnp.einsum("bsd,vd->bsv", x, embedding.astype(x.dtype))
    return _layers.soft_cap(found.astype(jnp.float32), LOGITS_CAP)


def forward(
    config: Config,
    parameters: dict[str, Any],
    inputs: Array,
    constrain: Any,
    policy: Any = None,
) -> Array:
    """Logits [b s v] of `inputs` [b s], the layers under `policy` if there is one."""
    x = constrain(embedded(config, parameters["embedding"], inputs))
    seen = masks(config, inputs.shape[1])
    x = run_layers(config, parameters["layers"], x, seen, constrain, policy)
    return logits(parameters["embedding"], norm(x, parameters["norm"]))


def optimizer(config: Config) -> optax.GradientTransformation:
    """AdamW, moments in the dtype of the parameters."""
    return optax.adamw(config.learning_rate, weight_decay=0.01)


def random_batch(config: Config) -> dict[str, Array]:
    """One batch of random tokens, each to be followed by the next."""
    drawn = _layers.tokens(
        jax.random.key(1), (config.batch, config.sequence + 1), config.vocabulary
    )
    return {"inputs": drawn[:, :-1], "labels": drawn[:, 1:]}


def make_step(config: Config, mesh: Mesh, *, policy: Any = None) -> Step:
    """The training step `(state, batch) -> (state, metrics)` on `mesh`."""
    constrain = _fsdp.along_batch(mesh)

    @stowax.stow
    def loss_fn(parameters: dict[str, Any], batch: dict[str, Array]) -> Array:
        found = forward(config, parameters, batch["inputs"], constrain, policy)
        return jnp.mean(_layers.cross_entropy(found, batch["labels"]))

    return _fsdp.make_step(loss_fn, optimizer(config), mesh)


def on_target(
    config: Config,
    target: Any,
    *,
    policy: Any = None,
    weights: jax.typing.DTypeLike = jnp.float32,
    **sizes: Any,
) -> tuple[Step, tuple[Any, ...]]:
    """Step and sharded specs on all devices of `target`.

    **Arguments:** a checkpoint `policy` makes it a step by hand; `weights` is the dtype
    of parameters and moments; `sizes` replace fields of `config`.
    """
    config = dataclasses.replace(config, **sizes)
    mesh = _fsdp.mesh_of(target, config.batch)
    specs = _fsdp.specs_of(
        mesh,
        lambda: initial_parameters(config, jax.random.key(0)),
        lambda: random_batch(config),
        optimizer=optimizer(config),
        weights=weights,
    )
    return make_step(config, mesh, policy=policy), specs


gemma2_2b = functools.partial(on_target, GEMMA2_2B)
gemma2_9b = functools.partial(on_target, GEMMA2_9B)
gemma2_27b = functools.partial(on_target, GEMMA2_27B)


def small() -> tuple[Step, tuple[Any, ...]]:
    """Step and real arrays on one attached device, for numerics on a CPU."""
    parameters = initial_parameters(SMALL, jax.random.key(0))
    state = {"parameters": parameters, "optimizer": optimizer(SMALL).init(parameters)}
    mesh = Mesh(jax.devices()[:1], (_fsdp.AXIS,))
    return make_step(SMALL, mesh), (state, random_batch(SMALL))
