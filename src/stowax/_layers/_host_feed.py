"""What an iteration over layers gets of its inputs, and where its gradients go.

`Feed` is one loop's per-layer inputs, wherever they lie: those on the device come with
the scan or, in an unrolled model, by `lax.switch`; those in host memory are fetched,
some of them an iteration early (`_host_turns`), and travel in the carry until then.
`Writer` is the same for gradients on their way out. Both are made anew for every loop
that is emitted; without anything in host memory they add nothing to it.

Copies stand under the scopes `stowax.weights.STACK.INPUT` and
`stowax.gradients.STACK.INPUT`, INPUT counting the stack's per-layer inputs, so that
every planned copy can be looked for in the compiled program.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .._jax import aval_of
from ._host_layers import HostGradients, HostLayers, after, can_order
from ._host_turns import Turn
from ._stack import Stack

WEIGHTS, GRADIENTS = "stowax.weights.", "stowax.gradients."
"""How the scopes of their copies begin."""


def weights_scope(stack: str, number: int) -> str:
    """Named scope of the copies of the per-layer input `number` of a stack."""
    return f"{WEIGHTS}{stack}.{number}"


def gradients_scope(stack: str, number: int) -> str:
    """Named scope of the copies of that input's gradients."""
    return f"{GRADIENTS}{stack}.{number}"


def neighbour(stack: Stack, layer: Any, steps: int, *, backward: bool) -> Any:
    """The layer that a loop comes to `steps` iterations later, or its last (first)."""
    down = stack.reverse != backward
    return jnp.clip(jnp.int32(layer) + (-steps if down else steps), 0, stack.count - 1)


class Feed:
    """The per-layer inputs of one loop.

    `turns` says when those in host memory are fetched. Inputs and turns go by the
    numbers of the body's inputs.
    """

    def __init__(
        self,
        stack: Stack,
        per_layer: Sequence[Any],
        turns: Mapping[int, Turn],
        *,
        backward: bool = False,
    ):
        self.stack, self.turns, self.backward = stack, turns, backward
        inputs = list(enumerate(per_layer, start=stack.first_layer_input))
        self.host = {i: x for i, x in inputs if isinstance(x, HostLayers)}
        self.device = {i: x for i, x in inputs if i not in self.host}

    def scanned(self) -> tuple[Any, list[Any]]:
        """What a scan hands to each iteration: its layer's number, stacked inputs."""
        stacked = [] if self.stack.separate else list(self.device.values())
        return jnp.arange(self.stack.count), stacked

    def start(self, signs: Sequence[Any]) -> dict[int, Any]:
        """The weights that are in flight before the first iteration.

        They are fetched when `signs` are there: copies outside of loops would be moved
        to the very beginning of the step, and hold memory.
        """
        ahead = [i for i in self.host if self.turns[i].ahead]
        if not ahead:
            return {}
        down = self.stack.reverse != self.backward
        first = self.stack.count - 1 if down else 0
        signs = [s for s in signs if can_order(aval_of(s))][:1]
        at = after(first, signs)
        return {i: self._fetch(i, at) for i in ahead}

    def inputs(
        self, x: tuple[Any, Any], ahead: Mapping[int, Any], signs: Sequence[Any] = ()
    ) -> dict[int, Any]:
        """An iteration's per-layer inputs; `x` is what the scan handed to it.

        Those that wait for others are not among them (`missing`); no weight is fetched
        before `signs` are there.
        """
        number, stacked = x
        if self.stack.separate:
            stacked = self._switched(number)
        found = dict(zip(self.device, stacked, strict=True))
        signs = [s for s in signs if can_order(aval_of(s))]
        for i, layers in self.host.items():
            if i in ahead:
                found[i] = layers.prepare(ahead[i])
            elif self.turns[i].after is None:
                found[i] = layers.prepare(self._fetch(i, after(number, signs)))
        return found

    def missing(self, x: tuple[Any, Any], i: int, values: Mapping[int, Any]) -> Any:
        """The input `i` of an iteration, which was to wait for one of `values`."""
        at = after(jnp.int32(x[0]), self._signs(i, values))
        return self.host[i].prepare(self._fetch(i, at))

    def following(
        self, number: Any, ahead: Mapping[int, Any], values: Mapping[int, Any]
    ) -> dict[int, Any]:
        """The next iteration's weights, on their way; `values` has what they wait for.

        After the last layer there is none to fetch: its own come once more.
        """
        layer = neighbour(self.stack, number, 1, backward=self.backward)
        return {i: self._fetch(i, after(layer, self._signs(i, values))) for i in ahead}

    def _signs(self, i: int, values: Mapping[int, Any]) -> list[Any]:
        wait = self.turns[i].after
        return [] if wait is None else [values[wait]]

    def _fetch(self, i: int, layer: Any) -> Any:
        number = i - self.stack.first_layer_input
        with jax.named_scope(weights_scope(self.stack.name, number)):
            return self.host[i].fetch(layer)

    def _switched(self, number: Any) -> list[Any]:
        if not self.device:
            return []
        with jax.named_scope("stowax.layer"):
            branches = [
                lambda layer=layer: tuple(xs[layer] for xs in self.device.values())
                for layer in range(self.stack.count)
            ]
            return list(jax.lax.switch(number, branches))


class Writer:
    """The gradients that one backward loop writes in place, most of them to the host.

    `places` says where, by the number of the body's input; those in `late` are written
    in the iteration after the one that makes them. `avals` are the types of one layer's
    gradients, as the body makes them.
    """

    def __init__(
        self,
        stack: Stack,
        places: Mapping[int, HostGradients],
        late: Sequence[int],
        avals: Mapping[int, Any],
    ):
        self.stack, self.places, self.late = stack, places, list(late)
        self.parts = {i: jax.eval_shape(p.finish, avals[i]) for i, p in places.items()}

    def start(self) -> tuple[dict[int, Any], dict[int, Any]]:
        """Buffers and waiting gradients, before the first iteration."""
        count = self.stack.count
        buffers = {i: p.empty(count, self.parts[i]) for i, p in self.places.items()}
        waiting = {i: self._nothing(i) for i in self.late}
        return buffers, waiting

    def _nothing(self, i: int) -> Any:
        part, sharding = self.parts[i], self.parts[i].sharding
        typed = sharding is not None and sharding.mesh.explicit_axes
        return jnp.zeros(part.shape, part.dtype, device=sharding if typed else None)

    def write_waiting(
        self, buffers: Mapping[int, Any], waiting: Mapping[int, Any], number: Any
    ) -> dict[int, Any]:
        """`buffers` with what the iteration before layer `number`'s left waiting.

        Before the first there was none: its place is written again by the next one.
        """
        if not waiting:
            return dict(buffers)
        layer = neighbour(self.stack, number, -1, backward=True)
        written = {i: self._write(buffers[i], w, i, layer) for i, w in waiting.items()}
        return {**buffers, **written}

    def write(
        self, buffers: Mapping[int, Any], gradients: Mapping[int, Any], number: Any
    ) -> tuple[dict[int, Any], dict[int, Any]]:
        """`buffers` with an iteration's own gradients, and those left waiting."""
        parts = {i: p.finish(gradients[i]) for i, p in self.places.items()}
        written = {
            i: self._write(buffers[i], part, i, jnp.int32(number))
            for i, part in parts.items()
            if i not in self.late
        }
        return {**buffers, **written}, {i: parts[i] for i in self.late}

    def finish(
        self, buffers: Mapping[int, Any], waiting: Mapping[int, Any]
    ) -> dict[int, Any]:
        """`buffers` with what the last iteration left waiting."""
        last = 0 if not self.stack.reverse else self.stack.count - 1
        written = {i: self._write(buffers[i], w, i, last) for i, w in waiting.items()}
        return {**buffers, **written}

    def _write(self, buffer: Any, part: Any, i: int, layer: Any) -> Any:
        number = i - self.stack.first_layer_input
        with jax.named_scope(gradients_scope(self.stack.name, number)):
            return self.places[i].write(buffer, part, layer)
