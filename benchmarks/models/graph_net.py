"""Message passing over the edges of one large graph, by layers of three kinds.

Edges outnumber nodes, so most of what is kept is per edge. The products of a layer are
cheap beside its gathers and sums. The layers are in `_graph`.

>>> step, args = model(SMALL).real("blocks")
>>> state, metrics = jax.jit(step)(*args)
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from benchmarks.models import _layers
from benchmarks.models._blocks import Block, Carry, Keys, Model, Weights
from benchmarks.models._graph import (
    Attention,
    Interaction,
    Isomorphism,
    dense,
    linear,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Kind and width of each layer, and the graph.

    Kinds: i interaction, a attention, s sum (isomorphism).
    """

    layers: tuple[tuple[str, int], ...] = (
        *(("i", 128), ("s", 192), ("a", 256), ("i", 256)),
        *(("s", 384), ("a", 384), ("i", 256), ("a", 128)),
    )
    edge_width: int = 128
    heads: int = 4
    nodes: int = 262_144
    edges: int = 3_145_728
    features: int = 64
    classes: int = 40
    compute: jax.typing.DTypeLike = jnp.bfloat16


SMALL = Config(
    layers=(("i", 8), ("s", 12), ("a", 8)),
    edge_width=8,
    heads=2,
    nodes=20,
    edges=60,
    features=5,
    classes=4,
    compute=jnp.float32,
)
LARGE = Config()


@dataclasses.dataclass(frozen=True, slots=True)
class Encoder:
    """Features of nodes and edges, as wide as the first layer wants them."""

    config: Config
    width: int

    def initial(self, keys: Keys) -> Weights:
        nodes = dense(keys, "nodes", self.config.features, self.width)
        return nodes | dense(keys, "edges", 1, self.config.edge_width)

    def __call__(self, weights: Weights, carry: Carry) -> Carry:
        x = carry["features"].astype(self.config.compute)
        lengths = carry["lengths"].astype(self.config.compute)
        edges = jax.nn.relu(linear(weights, "edges", lengths[:, None]))
        return carry | {"x": jax.nn.relu(linear(weights, "nodes", x)), "edges": edges}


@dataclasses.dataclass(frozen=True, slots=True)
class Head:
    """The loss: every node's class."""

    inputs: int
    classes: int

    def initial(self, keys: Keys) -> Weights:
        return dense(keys, "head", self.inputs, self.classes)

    def __call__(self, weights: Weights, carry: Carry) -> Carry:
        logits = linear(weights, "head", carry["x"])[:, None, :]
        losses = _layers.cross_entropy(logits, carry["labels"][:, None])
        return carry | {"loss": jnp.mean(losses)}


def blocks(config: Config) -> list[Block]:
    """The model: encoder, layers, head."""
    c = config
    x = c.layers[0][1]
    found: list[Block] = [Encoder(c, x)]
    for kind, wide in c.layers:
        found.append(
            {
                "i": Interaction(x, c.edge_width, wide),
                "a": Attention(x, c.edge_width, wide, c.heads),
                "s": Isomorphism(x, wide),
            }[kind]
        )
        x = wide
    return [*found, Head(x, c.classes)]


def random_batch(config: Config) -> Carry:
    """A random graph: each node hears of itself, too, so that none hears nothing."""
    c, keys = config, iter(jax.random.split(jax.random.key(1), 5))
    among = (c.edges - c.nodes,)
    itself = jnp.arange(c.nodes, dtype=jnp.int32)
    senders, receivers = (
        jnp.concatenate([itself, _layers.tokens(next(keys), among, c.nodes)])
        for _ in range(2)
    )
    shape = (c.nodes, c.features)
    return {
        "features": jax.random.normal(next(keys), shape, jnp.float32),
        "lengths": jax.random.uniform(next(keys), (c.edges,), jnp.float32),
        "senders": senders,
        "receivers": receivers,
        "labels": _layers.tokens(next(keys), (c.nodes,), c.classes),
    }


def model(config: Config) -> Model:
    """The model with its optimizer: AdamW."""
    return Model(
        blocks=blocks(config),
        optimizer=optax.adamw(1e-3, weight_decay=0.01),
        batch=lambda: random_batch(config),
    )
