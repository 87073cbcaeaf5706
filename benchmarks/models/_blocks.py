"""Steps of models that are a list of different blocks, and checkpoints by hand.

A block is a function of its weights and of what goes through the model, a dictionary
(`Carry`): it returns that with its own values in it. The first block reads the batch,
the last one leaves a "loss". Blocks with batch norm collect "statistics", which the
step averages over time.

`POLICIES` are the ways to use `jax.checkpoint` that need no knowledge of the model:
nothing, the whole loss, every block, every group of about √n of n blocks (Chen et al.,
"Training Deep Nets with Sublinear Memory Cost", 2016).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from jax import Array

import stowax
from benchmarks.models import _layers

Weights = dict[str, Array]
Carry = dict[str, Any]
Keys = Iterator[Array]
Step = Callable[..., Any]

POLICIES = ("none", "all", "blocks", "sqrt")
AVERAGED = 0.9
"""Part of the old running statistics that a step keeps."""


class Block(Protocol):
    """Part of a model: its initial weights, and what it does with them."""

    def initial(self, keys: Keys) -> Weights: ...

    def __call__(self, weights: Weights, carry: Carry) -> Carry: ...


def keys_of(key: Array) -> Keys:
    """As many keys as are asked for."""
    while True:
        key, found = jax.random.split(key)
        yield found


def group_size(blocks: int, policy: str) -> int:
    """How many blocks share a checkpoint; 0 where no block has one of its own."""
    if policy not in POLICIES:
        raise ValueError(f"policy: one of {', '.join(POLICIES)}, not {policy!r}")
    return {"blocks": 1, "sqrt": round(math.sqrt(blocks))}.get(policy, 0)


def run(
    blocks: Sequence[Block], weights: Sequence[Weights], carry: Carry, policy: str
) -> Carry:
    """Every block on what the one before returned, under the policy's checkpoints."""
    size = group_size(len(blocks), policy)
    if not size:
        return _chain(blocks, weights, carry)
    for i in range(0, len(blocks), size):
        group = functools.partial(_chain, blocks[i : i + size])
        carry = jax.checkpoint(group)(weights[i : i + size], carry)
    return carry


def _chain(blocks: Sequence[Block], weights: Sequence[Weights], carry: Carry) -> Carry:
    for block, own in zip(blocks, weights, strict=True):
        carry = block(own, carry)
    return carry


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Blocks, the optimizer of their weights, and what makes a batch."""

    blocks: Sequence[Block]
    optimizer: optax.GradientTransformation
    batch: Callable[[], Carry]

    def real(self, policy: str = "none") -> tuple[Step, tuple[Any, ...]]:
        """Training step and real arrays, for small sizes."""
        return self.make_step(policy), jax.jit(self._arguments)()

    def sized(self, policy: str = "none") -> tuple[Step, tuple[Any, ...]]:
        """Training step and `jax.ShapeDtypeStruct`s, for any size."""
        return self.make_step(policy), jax.eval_shape(self._arguments)

    def _arguments(self) -> tuple[Any, ...]:
        keys, batch = keys_of(jax.random.key(0)), self.batch()
        parameters = [block.initial(keys) for block in self.blocks]
        moments = self.optimizer.init(parameters)
        state = {"parameters": parameters, "optimizer": moments}
        given = jax.eval_shape(lambda: _chain(self.blocks, parameters, batch))
        if "statistics" in given:
            zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), given)
            state["statistics"] = zeros["statistics"]
        return state, batch

    def make_step(self, policy: str) -> Step:
        """The training step: `(state, batch) -> (state, metrics)`."""

        def loss_fn(parameters: list[Weights], batch: Carry) -> tuple[Array, Any]:
            carry = run(self.blocks, parameters, batch, policy)
            return carry["loss"], carry.get("statistics")

        marked = stowax.stow(jax.checkpoint(loss_fn) if policy == "all" else loss_fn)

        def train_step(state: dict[str, Any], batch: Carry):
            parameters = state["parameters"]
            (loss, found), gradients = jax.value_and_grad(marked, has_aux=True)(
                parameters, batch
            )
            parameters, moments = _layers.updated(
                self.optimizer, parameters, state["optimizer"], gradients
            )
            new = {"parameters": parameters, "optimizer": moments}
            if found is not None:
                new["statistics"] = jax.tree.map(
                    lambda old, now: AVERAGED * old + (1 - AVERAGED) * now,
                    *(state["statistics"], found),
                )
            return new, {"loss": loss}

        return train_step
