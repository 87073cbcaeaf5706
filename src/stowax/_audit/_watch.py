"""What a running program does with JAX, noted as `Event`s while it runs.

Kept small, as it runs at every call: no array is kept alive by it. Who made a value is
told by the ids of recent results; which arrays die unused, by weak references.
"""

import collections
import functools
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any

import jax
import numpy as np

from .._jax_hooks import Array, listen_only_to, live_arrays, unwatched
from .._records._audit import Alive, Event, Facts, Recording, Sample, SentValue
from .._watcher import Trip, Watcher
from .._where import Place, called_by_user, here
from . import _arrays
from ._arrays import elsewhere, has_moved, is_reuse, memory_limit, token_of, total_bytes
from ._donations import Donations
from ._facts import facts_of
from ._host_memory import HostMemory
from ._known import Function, Known
from ._pace import Pace
from ._sampler import Sampler
from ._signature import difference, signature_of
from ._values import Sent, arguments_of, names_of, sent, sent_leaves
from ._values import is_of_the_host as is_hosts

_RECENT = 512  # events whose results are known by their ids
_KEPT_BYTES = 4096  # arrays below are not followed: growth of this size is none
_CLOSELY = 4  # calls of each function that are looked at for where arguments lie
_UNUSABLE = "Some donated buffers were not usable"
_VARIES = object()  # a value that is not the same in every step


def _safely(tell: Callable[..., None]) -> Callable[..., None]:
    """A mistake of the audit's ends the audit, and not the program that it looks at.

    What the audit takes is added up, and while it rests, only calls are told.
    """
    calls = tell.__name__ == "ran"

    @functools.wraps(tell)
    def told(self: "Recorder", *args: Any) -> None:
        if self.full:
            return
        if self.pace.resting and not (calls and self.pace.wakes(args[0], args[4].slow)):
            return
        began = time.perf_counter()
        try:
            tell(self, *args)
        except Exception as error:
            self.failed, self.full = f"{type(error).__name__}: {error}", True
        self.pace.spent += time.perf_counter() - began

    return told


class Recorder(Watcher):
    """Notes what happens until `limit` steps have been seen."""

    def __init__(self, limit: int, least_bytes: int):
        self.limit, self.least_bytes = limit, least_bytes
        self.events: list[Event] = []
        self.full = False
        self.failed = ""
        self.on_full: Callable[[], None] | None = None
        self.samples: list[Sample] = []
        self.pace = Pace()
        self._known = Known()
        self._donations = Donations(least_bytes)
        self._memory = HostMemory()
        self._calls: collections.Counter = collections.Counter()
        self._signatures: dict[Any, Any] = {}
        self._facts: dict[Any, Any] = {}
        self._makers: dict[int, int] = {}
        self._passed_by = 0
        self._paused = 0  # what was made before may be another's by now
        self._last_sent: dict[Any, Any] = {}
        self._copies: list[tuple[Any, Alive]] = []
        self._warnings: list[tuple[Any, str]] = []
        self._newest: list[Any] = []
        self._thread = threading.get_ident()
        self._lock = threading.RLock()
        self._sampler: Sampler | None = None

    # --- what the hooks tell --------------------------------------------------------

    @_safely
    def ran(
        self, function: Any, args: Any, kwargs: Any, results: Any, trip: Trip, /
    ) -> None:
        now, place = time.perf_counter(), here()
        known = self._known.function(function)
        if self._rests(place, known, now) and not trip.slow:
            return
        arguments = arguments_of(function, args, kwargs)
        leaves, structure = jax.tree.flatten(arguments)
        made = jax.tree.leaves(results)
        types = self._known.made(function, made)

        def names() -> list[str]:
            return names_of(function, arguments, structure)

        with self._lock:
            number = len(self.events)
            if known.name == "stage":  # jax.numpy.asarray of what is not on the device
                values = [leaf for leaf in leaves if isinstance(leaf, np.ndarray)]
                self._note_put(place, values, made, number)
                return
            if trip.slow:
                host = [sent(n, v) for n, v in trip.leaves if is_hosts(v)]
            else:
                host = sent_leaves(leaves, names)
            event = Event(
                what="operation" if known.operation else "call",
                place=place,
                name=known.name,
                key=known.key,
                library=known.library,
                thread=threading.get_ident(),
                at=now,
                bytes=types.total,
                sent=tuple([self._note_sent(place, known.name, v) for v in host]),
            )
            self.pace.note(
                (place, known.key), function, types.total, not known.operation
            )
            self._donations.use(leaves)
            if not known.operation:
                event = self._look_at_call(
                    event, known, function, (args, kwargs), made, trip
                )
                self._donations.note(
                    number, function, known, place, leaves, names, made, types.largest
                )
            if not self.full:  # with that call begins a step that is not looked at
                self.events.append(event)
                self._note_made(made, number)
        self._tell_if_full()

    def _tell_if_full(self) -> None:
        if self.full and (tell := self.on_full) is not None:
            self.on_full = None
            tell()

    def _rests(self, place: Place, known: Function, now: float) -> bool:
        """Whether a call is passed by, so that the loop is not slowed down."""
        with self._lock:
            before = self.pace.resting
            rests = self.pace.at_call((place, known.key), now)
            if rests != before:
                listen_only_to(self, self.pace.function if rests else None)
            if rests and not before:
                self.events.append(Event("pause", place, at=now))
                self._donations.forget()
                self._paused = len(self.events)
            if rests and self.pace.leads((place, known.key)):
                self._calls[place, known.key] += 1
                self.full = self._calls[place, known.key] > self.limit
                self._passed_by += 1
                self._tell_if_full()
        return rests

    @_safely
    def was_read(self, how: str, value: Any, seconds: float, result: Any) -> None:
        if type(value) is Array:
            arrays = [value]
        else:
            arrays = [leaf for leaf in jax.tree.leaves(value) if type(leaf) is Array]
            if not arrays:
                return
        with self._lock:
            number = len(self.events)
            size = self._note_seen("read", how, arrays, seconds)
            if size < _KEPT_BYTES:
                return
            for leaf in jax.tree.leaves(result):
                # What is no copy keeps the array itself alive.
                copied = isinstance(leaf, np.ndarray) and leaf.flags.owndata
                if copied and leaf.nbytes >= _KEPT_BYTES:
                    self._copies.append((weakref.ref(leaf), Alive(number, leaf.nbytes)))

    @_safely
    def waited(self, value: Any, seconds: float) -> None:
        if not called_by_user():
            return  # Equinox does so in every call, to see errors
        arrays = [leaf for leaf in jax.tree.leaves(value) if type(leaf) is Array]
        self._note_seen("wait", "block_until_ready", arrays, seconds)

    @_safely
    def put(self, values: Any, results: Any) -> None:
        place = here()
        with self._lock:
            self._note_put(place, values, results, len(self.events))

    def warned(self, message: str) -> None:
        if message.startswith(_UNUSABLE):
            self._warnings.append((here(), message.partition("\n")[0]))

    def failed_with(self, value: Any, error: BaseException) -> None:
        if not self.full and is_reuse(error):
            message = f"{str(error).partition(chr(10))[0]:.200}"
            self._donations.use_again(jax.tree.leaves(value), here(), message)

    # --- noting ---------------------------------------------------------------------

    def _look_at_call(
        self,
        event: Event,
        known: Function,
        function: Any,
        arguments: Any,
        made: list[Any],
        trip: Trip,
    ) -> Event:
        # One of them is dropped at once, maybe, as a loss that nobody reads.
        self._newest = [weakref.ref(leaf) for leaf in (*made[:1], *made[-1:])]
        self._thread = event.thread
        self._calls[event.place, known.key] += 1
        count = self._calls[event.place, known.key]
        self.full = count > self.limit
        call = event.place, known.key
        self._memory.at_call(call, count, self.pace.leads(call), len(self.events))
        if trip.slow or known.key not in self._signatures:
            event = self._look_at_trip(event, known, function, arguments, trip)
        if count <= _CLOSELY:
            event = event._replace(
                elsewhere=elsewhere(
                    arguments, getattr(function, "_fun", function), made
                )
            )
        return event

    def _look_at_trip(
        self, event: Event, known: Function, function: Any, arguments: Any, trip: Trip
    ) -> Event:
        signature = signature_of(function, arguments, trip)
        before = self._signatures.get(known.key)
        self._signatures[known.key] = signature
        if known.key not in self._facts:
            with unwatched():
                self._facts[known.key] = self._facts_of(function, arguments, trip)
        if before is None or not trip.compiled_seconds:
            return event
        return event._replace(
            compiled_seconds=trip.compiled_seconds,
            changed=difference(before, signature),
        )

    def _facts_of(self, function: Any, arguments: Any, trip: Trip) -> Any:
        params = trip.params
        if params is None and hasattr(function, "_fun"):
            args, kwargs = arguments
            traced = function.trace(*args, **kwargs)
            donated = [leaf.donated for leaf in jax.tree.leaves(traced.args_info)]
            return facts_of(traced.jaxpr, donated, self.least_bytes)
        if params is None:
            return Facts()
        return facts_of(params["jaxpr"], params["donated_invars"], self.least_bytes)

    def _note_sent(self, place: Any, name: str, value: Sent) -> SentValue:
        same = self._is_same((place, name, value.name), value.value)
        return SentValue(value.name, value.described, value.bytes, same)

    def _is_same(self, key: Any, value: Any) -> bool:
        """Whether `value` is at this place the same as ever: asked until it is not."""
        before = self._last_sent.get(key)
        if before is _VARIES:
            return False
        token = token_of(value)
        if before is None or before == token:
            self._last_sent[key] = token
        else:
            self._last_sent[key] = _VARIES
        return before == token

    def _note_put(self, place: Any, values: Any, made: Any, number: int) -> None:
        host = [v for v in values if isinstance(v, np.ndarray | float | int)]
        moved = [
            value
            for value, result in zip(values, made, strict=False)
            if type(value) is Array and has_moved(value, result)
        ]
        if not host and not moved:
            return
        found = [sent("value", value) for value in host]
        self.events.append(
            Event(
                what="put",
                place=place,
                name="jax.device_put",
                thread=threading.get_ident(),
                at=time.perf_counter(),
                bytes=total_bytes(moved) + sum(value.bytes for value in found),
                sent=(
                    SentValue(
                        found[0].name,
                        found[0].described,
                        sum(value.bytes for value in found),
                        self._is_same((place, "put"), host),
                    ),
                )
                if found
                else (),
                moved=bool(moved),
            )
        )
        self._donations.use(values)
        self._note_made(made, number)

    def _note_seen(self, what: str, how: str, arrays: list, seconds: float) -> int:
        place, size = here(), total_bytes(arrays)
        with self._lock:
            made = max(map(self._maker, arrays), default=-1)
            self._donations.use(arrays)
            self.events.append(
                Event(
                    what=what,
                    place=place,
                    name=how,
                    thread=threading.get_ident(),
                    at=time.perf_counter(),
                    bytes=size,
                    seconds=seconds,
                    made=made,
                )
            )
        return size

    def _maker(self, array: Any) -> int:
        number = self._makers.get(id(array), -1)
        recent = max(self._paused, len(self.events) - _RECENT)
        return number if number >= recent else -1

    def _note_made(self, made: Any, number: int) -> None:
        # An array that is alive was made by the newest event that made one of its id.
        self._makers.update(zip(map(id, made), repeat(number)))

    # --- the ends -------------------------------------------------------------------

    def begin(self) -> None:
        """Starts to look where this thread stands."""
        self._sampler = Sampler(
            lambda: self._thread, self._newest_result, self.pace, self._memory.look
        )
        self._sampler.start()

    def _newest_result(self) -> Any:
        leaves = (reference() for reference in self._newest)
        return next((leaf for leaf in leaves if leaf is not None), None)

    def mark_step(self) -> None:
        """A step begins here, says who knows."""
        event = Event("step", here(), thread=threading.get_ident())
        self.events.append(event._replace(at=time.perf_counter()))

    def end(self, error: BaseException | None = None) -> Recording:
        """Stops, and hands out what was seen."""
        if self._sampler is not None:
            self._sampler.stop()
            self.samples, self._sampler = self._sampler.samples, None
        if error is not None:
            self._donations.ended_by(error)
        self.full = True
        self._memory.end()
        gc.collect()
        return Recording(
            events=tuple(self.events),
            facts=dict(self._facts),
            unused=tuple(self._donations.unused),
            alive=tuple(self._alive()),
            grown=self._memory.grown,
            resident=tuple(self._memory.resident),
            devices=_arrays.local_devices() if self._makers else (1, ""),
            samples=tuple(self.samples),
            warnings=tuple(self._warnings),
            reused=tuple(self._donations.reused),
            passed_by=self._passed_by,
            failed=self.failed,
            enough_bytes=max(
                1024 * self.least_bytes, memory_limit() // 8 if self._facts else 0
            ),
        )

    def _alive(self) -> Iterator[Alive]:
        """What was made meanwhile and is alive: on devices, and copied to the host."""
        for array in live_arrays() if self._makers else ():  # a backend may not start
            number = self._makers.get(id(array))
            if number is not None and array.nbytes >= _KEPT_BYTES:
                yield Alive(number, array.nbytes)
        yield from (alive for ref, alive in self._copies if ref() is not None)
