"""Who watches a running program: what it is told of, by `_jax_hooks.watch`; no JAX."""

from typing import Any


class Watcher:
    """What is told; each method may raise, and then the user's line does."""

    def starts(self, function: Any, trip: "Trip") -> None:
        """A jitted function goes the slow way, and has not run yet."""

    def ran(
        self, function: Any, args: Any, kwargs: Any, results: Any, trip: "Trip", /
    ) -> None:
        """A jitted function was dispatched."""

    def reads(self, array: Any) -> None:
        """An array's values are about to be read, without `jax.device_get`."""

    def was_read(self, how: str, value: Any, seconds: float, result: Any) -> None:
        """Values came to the host; `how` is what asked for them."""

    def put(self, values: Any, results: Any) -> None:
        """`jax.device_put` placed something."""

    def waited(self, value: Any, seconds: float) -> None:
        """`block_until_ready` returned."""

    def failed_with(self, value: Any, error: BaseException) -> None:
        """A read, a wait or a call with `value` raised."""

    def warned(self, message: str) -> None:
        """A warning was given."""


class Trip:
    """How a call went: if by the slow way, what is known of it there.

    `leaves` are names and values of the arguments that are not static, `params` those
    of its equation; `compiled_seconds` went into compiling it.
    """

    __slots__ = ("compiled_seconds", "leaves", "params", "slow")

    def __init__(self, leaves: Any = None, params: Any = None):
        self.slow, self.leaves, self.params = params is not None, leaves, params
        self.compiled_seconds = 0.0


FAST = Trip()
