"""Layers that pass messages over the edges of a graph.

Interactions update edges and nodes (Battaglia et al., "Relational inductive biases",
2018), attention weights what a node hears (Brody et al., "How Attentive are Graph
Attention Networks?", 2022), isomorphism layers add it up (Xu et al., "How Powerful are
Graph Neural Networks?", 2019).

What goes through them has nodes "x" [nodes d], "edges" [edges d], and the numbers of
the nodes that send and receive over each edge.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.models import _conv, _layers
from benchmarks.models._blocks import Carry, Keys, Weights


def dense(keys: Keys, name: str, inputs: int, outputs: int) -> Weights:
    """Initial weights of a product and its bias."""
    return {
        name: _layers.normal(next(keys), (inputs, outputs), inputs),
        f"{name}_bias": jnp.zeros((outputs,), jnp.float32),
    }


def linear(weights: Weights, name: str, x: Array) -> Array:
    """`x` times a weight, plus its bias."""
    return _conv.bias(x @ weights[name].astype(x.dtype), weights[f"{name}_bias"])


def received(carry: Carry, messages: Array) -> Array:
    """Per node the sum of the `messages` [edges d] that it receives."""
    nodes, wide = carry["x"].shape[0], messages.astype(jnp.float32)
    found = jax.ops.segment_sum(wide, carry["receivers"], nodes)
    return found.astype(messages.dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class Interaction:
    """Edges hear of both their ends, nodes of all their edges."""

    inputs: int
    edges: int
    outputs: int

    def initial(self, keys: Keys) -> Weights:
        weights = dense(keys, "edge_in", self.edges + 2 * self.inputs, self.outputs)
        weights |= dense(keys, "edge_out", self.outputs, self.edges)
        weights |= dense(keys, "node_in", self.inputs + self.edges, self.outputs)
        return weights | dense(keys, "node_out", self.outputs, self.outputs)

    def __call__(self, weights: Weights, carry: Carry) -> Carry:
        x, edges = carry["x"], carry["edges"]
        ends = (x[carry["senders"]], x[carry["receivers"]])
        inner = linear(weights, "edge_in", jnp.concatenate([edges, *ends], axis=-1))
        edges = edges + linear(weights, "edge_out", jax.nn.silu(inner))
        heard = jnp.concatenate([x, received(carry, edges)], axis=-1)
        inner = jax.nn.silu(linear(weights, "node_in", heard))
        return carry | {"x": linear(weights, "node_out", inner), "edges": edges}


@dataclasses.dataclass(frozen=True, slots=True)
class Attention:
    """What a node hears adds up to one, per head: a softmax over its edges."""

    inputs: int
    edges: int
    outputs: int
    heads: int

    def initial(self, keys: Keys) -> Weights:
        weights = dense(keys, "sender", self.inputs, self.outputs)
        weights |= dense(keys, "receiver", self.inputs, self.outputs)
        weights |= dense(keys, "edge", self.edges, self.outputs)
        shape = (self.heads, self.outputs // self.heads)
        return weights | {"score": _layers.normal(next(keys), shape, shape[1])}

    def __call__(self, weights: Weights, carry: Carry) -> Carry:
        x, nodes = carry["x"], carry["x"].shape[0]
        senders, receivers = carry["senders"], carry["receivers"]
        spoken = linear(weights, "sender", x)[senders]
        inner = spoken + linear(weights, "receiver", x)[receivers]
        inner = jax.nn.leaky_relu(inner + linear(weights, "edge", carry["edges"]), 0.2)
        inner = inner.reshape(-1, *weights["score"].shape)
        score = weights["score"].astype(x.dtype)
        scores = jnp.einsum("nhd,hd->nh", inner, score).astype(jnp.float32)
        highest = jax.ops.segment_max(jax.lax.stop_gradient(scores), receivers, nodes)
        shares = jnp.exp(scores - highest[receivers])
        total = jax.ops.segment_sum(shares, receivers, nodes)
        shares = (shares / total[receivers]).astype(x.dtype)
        messages = spoken.reshape(inner.shape) * shares[:, :, None]
        return carry | {
            "x": jax.nn.elu(received(carry, messages.reshape(spoken.shape)))
        }


@dataclasses.dataclass(frozen=True, slots=True)
class Isomorphism:
    """The sum of all neighbours, and two products."""

    inputs: int
    outputs: int

    def initial(self, keys: Keys) -> Weights:
        weights = dense(keys, "first", self.inputs, self.outputs)
        return weights | dense(keys, "second", self.outputs, self.outputs)

    def __call__(self, weights: Weights, carry: Carry) -> Carry:
        x = carry["x"] + received(carry, carry["x"][carry["senders"]])
        x = jax.nn.relu(linear(weights, "first", x))
        return carry | {"x": jax.nn.relu(linear(weights, "second", x))}
