"""A stretch of a program in which an implicit transfer is an error: `stowax.strict`.

JAX's own guard (`jax.transfer_guard("disallow")`) refuses what nobody would call a
transfer, such as `x + 1` or `jax.numpy.zeros(3)`, and lets every read of a CPU array
pass. Here the rule is what a reader sees: NumPy or Python values handed to a jitted
function, NumPy arrays among the operands of an operation, and reads of a result other
than by `jax.device_get`.

A call that JAX has made before is over when it is seen: its result is lost, and what it
donated is gone. A loop that stops with this error is to be started again.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from .._audit._values import Sent, is_of_the_host, is_operation, sent, sent_values
from .._errors import TransferError
from .._jax_hooks import watch
from .._units import format_bytes
from .._watcher import Trip, Watcher
from .._where import here


@contextlib.contextmanager
def strict() -> Iterator[None]:
    """In this context an implicit transfer is an error that names the user's line.

    Explicit are `jax.device_put`, `jax.numpy.asarray`, `stowax.prefetch` and
    `jax.device_get`. It holds for the thread that entered it; other threads go on.

    **Raises:** within, `TransferError`.

    >>> step = jax.jit(lambda w, rate: w * rate)
    >>> with strict():
    ...     try:
    ...         step(jnp.ones(2), 0.5)
    ...     except stowax.StowaxError as error:
    ...         print(error)
    <...>:3: rate, an argument of <lambda>, is a float, which is sent to the device at
    every call. Place it once and beforehand: jax.device_put(...), or batches with
    stowax.prefetch(...).
    """
    with watch(_Strict()):
        yield


class _Strict(Watcher):
    def __init__(self) -> None:
        self.thread = threading.get_ident()

    def starts(self, function: Any, trip: Trip) -> None:
        found = [sent(name, leaf) for name, leaf in trip.leaves if is_of_the_host(leaf)]
        self._refuse(function, found)

    def ran(self, function: Any, args: Any, kwargs: Any, _: Any, trip: Trip, /) -> None:
        if not trip.slow:
            found = sent_values(function, args, kwargs)
            self._refuse(getattr(function, "_fun", function), found)

    def reads(self, array: Any) -> None:
        if threading.get_ident() == self.thread:
            place = here()
            raise TransferError(
                place.file,
                place.line,
                f"an array of {format_bytes(array.nbytes)} is read from the device",
                "Write jax.device_get(...) where that is meant, outside of the loop or "
                "every so many steps.",
            )

    def _refuse(self, inner: Any, found: list[Sent]) -> None:
        if not found or threading.get_ident() != self.thread:
            return
        if is_operation(inner):  # a literal beside an array is none, as in x + 1
            found = [value for value in found if value.kind == "ndarray"]
        for value in found:
            place = here()
            name = getattr(inner, "__name__", "a compiled program")
            raise TransferError(
                place.file,
                place.line,
                f"{value.name}, an argument of {name}, is {value.described}, which is "
                "sent to the device at every call",
                "Place it once and beforehand: jax.device_put(...), or batches with "
                "stowax.prefetch(...).",
            )
