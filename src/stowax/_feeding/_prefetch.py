"""Batches that are on the device before the step asks for them: `stowax.prefetch`.

A thread pulls batches from the user's iterator and places each with one
`jax.device_put`, so that neither loading nor the copy is waited for by the loop.

What goes silently wrong without care: a loader that fills the same buffer again would
change a batch that is still being copied, or that a CPU device shares with it. So
nothing is shared, and the next batch is pulled when the copy before it is done. And
settings made by JAX's contexts belong to a thread: those that decide what a batch
becomes are taken along.
"""

import contextlib
import queue
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from .._errors import ArgumentError

_LEAVE_WITHIN_SECONDS = 1.0


def prefetch(
    iterator: Iterable[Any], size: int = 2, sharding: Any = None
) -> "Prefetch":
    """The batches of `iterator`, each on the device before it is asked for.

    **Arguments:** `iterator` yields pytrees of arrays. `size` batches at most lie ready
    on the device beside the one in use. `sharding` says where they go: a
    `jax.sharding.Sharding`, a device, a pytree of them as `jax.device_put` takes it, or
    what `plan.specs(batch)` returned; without it, the default device.

    **Returns:** an iterator, for one thread or several, each batch for one of them. It
    ends where `iterator` ends; an error in there is raised
    in its place in the order of batches. Leaving early is fine: `close()`, a `with`
    block or the end of its life stops the thread, and closes the generator behind it.

    **Raises:** `ArgumentError` for what is no iterable, and a size below 1.

    >>> for batch in stowax.prefetch([1, 2], size=2):
    ...     print(type(batch).__name__, batch)
    ArrayImpl 1
    ArrayImpl 2
    """
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ArgumentError(
            "size", f"{size!r}", "Write a number of batches, 1 or more."
        )
    if not hasattr(iterator, "__iter__") and not hasattr(iterator, "__getitem__"):
        raise ArgumentError(
            "iterator",
            type(iterator).__name__,
            "Pass what yields batches, such as stowax.prefetch(iter(loader)).",
        )
    return Prefetch(iter(iterator), size, _shardings(sharding))


def _shardings(given: Any) -> Any:
    """Specs, as a plan hands them out, stand for where they lie."""

    def place(leaf: Any) -> Any:
        return leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) else leaf

    return jax.tree.map(place, given)


class _Shared:
    """What the thread and the loop both know; the thread does not know the loop's."""

    def __init__(self, size: int):
        self.ready: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.free = threading.Semaphore(size)
        self.stopped = threading.Event()

    def stop(self) -> None:
        """Lets the thread end at its next turn."""
        self.stopped.set()
        self.free.release()


def _on_cpu(sharding: Any) -> bool:
    """Whether batches go where JAX may share a numpy array's memory.

    It does so on the CPU wherever the address is a multiple of 64, also against
    `may_alias=False` (JAX 0.10).
    """
    devices = {
        device
        for leaf in jax.tree.leaves(sharding)
        for device in getattr(leaf, "device_set", {leaf})
    } or {*jax.numpy.zeros(()).devices()}
    return any(getattr(device, "platform", "cpu") == "cpu" for device in devices)


def _own(leaf: Any) -> Any:
    return np.array(leaf) if isinstance(leaf, np.ndarray) else leaf


def _fill(
    source: Iterator[Any], shared: _Shared, sharding: Any, settings: Any, x64: bool
) -> None:
    try:
        with settings(), jax.enable_x64(x64):
            copied = _on_cpu(sharding)
            while True:
                shared.free.acquire()
                if shared.stopped.is_set():
                    break
                try:
                    batch = next(source)
                except StopIteration:
                    break
                if copied:
                    batch = jax.tree.map(_own, batch)
                placed = jax.device_put(batch, sharding)
                shared.ready.put(("batch", jax.block_until_ready(placed)))
                del batch, placed  # nothing is kept alive while the queue is full
    except BaseException as error:
        shared.ready.put(("error", error))
    finally:
        if (close := getattr(source, "close", None)) and shared.stopped.is_set():
            with contextlib.suppress(Exception):
                close()
        shared.ready.put(("end", None))


class Prefetch:
    """An iterator over batches that are placed ahead of their use, see `prefetch`."""

    def __init__(self, source: Iterator[Any], size: int, sharding: Any):
        self._shared = _Shared(size)
        config: Any = jax.config
        device, x64 = config.jax_default_device, bool(config.jax_enable_x64)

        def settings() -> Any:
            if device is None:
                return contextlib.nullcontext()
            return jax.default_device(device)

        self._thread = threading.Thread(
            target=_fill,
            args=(source, self._shared, sharding, settings, x64),
            name="stowax-prefetch",
            daemon=True,
        )
        # Also at the end of the process, and where the loop was left by `break`.
        self._finalizer = weakref.finalize(self, _end, self._shared, self._thread)
        self._over = self._dropped = False
        self._thread.start()

    def __iter__(self) -> "Prefetch":
        return self

    def __next__(self) -> Any:
        if self._over:
            raise StopIteration
        kind, value = self._shared.ready.get()
        # A thread that took the last batch may get here after one that met the end.
        if kind == "batch" and not self._dropped:
            self._shared.free.release()
            return value
        self._finish()
        if kind == "error":
            raise value
        raise StopIteration

    def close(self) -> None:
        """Stops placing batches; what lies ready is dropped."""
        self._dropped = True
        self._finish()

    def _finish(self) -> None:
        self._over = True
        # Another thread may wait for a batch here; it wakes the next one.
        self._shared.ready.put(("end", None))
        self._finalizer()

    def __enter__(self) -> "Prefetch":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _end(shared: _Shared, thread: threading.Thread) -> None:
    shared.stop()
    if thread is not threading.current_thread():
        # A thread that waits for a slow loader ends when that answers.
        thread.join(_LEAVE_WITHIN_SECONDS)
