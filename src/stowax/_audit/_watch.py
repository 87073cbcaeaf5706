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
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from .._jax_hooks import Array, Trip, Watcher, unwatched
from .._records._audit import Alive, Event, Facts, Recording, Sample, SentValue, Unused
from .._where import called_by_user, here
from ._arrays import (
    anonymous,
    bytes_of,
    code_of,
    elsewhere,
    has_moved,
    reuse_of,
    token_of,
    total_bytes,
)
from ._facts import facts_of
from ._sampler import Sampler
from ._signature import difference, signature_of
from ._values import (
    Sent,
    argument_name,
    is_of_the_host,
    is_operation,
    sent,
    sent_values,
)

_RECENT = 512  # events whose results are known by their ids
_KEPT_BYTES = 4096  # arrays below are not followed: growth of this size is none
_CLOSELY = 4  # calls of each function that are looked at for where arguments lie
_UNUSABLE = "Some donated buffers were not usable"


class _Function(NamedTuple):
    """What is known of a jitted function; `code` is the same for one made anew."""

    function: Any  # keeps its id its own
    inner: Any
    name: str
    operation: bool
    code: Any


def _safely(tell: Callable[..., None]) -> Callable[..., None]:
    """A mistake of the audit's ends the audit, and not the program that it looks at."""

    @functools.wraps(tell)
    def told(self: "Recorder", *args: Any, **kwargs: Any) -> None:
        if self.full:
            return
        try:
            tell(self, *args, **kwargs)
        except Exception as error:
            self.failed, self.full = f"{type(error).__name__}: {error}", True

    return told


class _Candidate(NamedTuple):
    reference: Any
    unused: Unused


class Recorder(Watcher):
    """Notes what happens until `limit` steps have been seen."""

    def __init__(self, limit: int, least_bytes: int):
        self.limit, self.least_bytes = limit, least_bytes
        self.events: list[Event] = []
        self.full = False
        self.failed = ""
        self.on_full: Callable[[], None] | None = None
        self.samples: list[Sample] = []
        self._functions: dict[int, _Function] = {}
        self._calls: collections.Counter = collections.Counter()
        self._signatures: dict[Any, Any] = {}
        self._facts: dict[Any, Any] = {}
        self._recent: collections.deque = collections.deque(maxlen=_RECENT)
        self._last_sent: dict[Any, Any] = {}
        self._candidates: dict[int, _Candidate] = {}
        self._unused: list[Unused] = []
        self._made: list[tuple[Any, Alive]] = []
        self._warnings: list[tuple[Any, str]] = []
        self._reused: Any = None
        self._newest: Any = None
        self._lock = threading.RLock()
        self._sampler: Sampler | None = None

    # --- what the hooks tell --------------------------------------------------------

    @_safely
    def ran(
        self, function: Any, args: Any, kwargs: Any, results: Any, trip: Trip, /
    ) -> None:
        place, now = here(), time.perf_counter()
        known = self._known(function)
        leaves, made = jax.tree.leaves((args, kwargs)), jax.tree.leaves(results)
        sizes = [*map(bytes_of, made)]
        with self._lock:
            number = len(self.events)
            if known.name == "stage":  # jax.numpy.asarray of what is not on the device
                values = [leaf for leaf in leaves if isinstance(leaf, np.ndarray)]
                self._note_put(place, values, made, number)
                return
            if trip.slow:
                host = [sent(n, v) for n, v in trip.leaves if is_of_the_host(v)]
            else:
                host = sent_values(function, args, kwargs)
            what = "operation" if known.operation else "call"
            event = Event(
                what=what,
                place=place,
                name=known.name,
                key=known.code,
                thread=threading.get_ident(),
                at=now,
                bytes=sum(sizes),
                sent=tuple(self._note_sent(place, known.name, v) for v in host),
            )
            self._use(leaves)
            if not known.operation:
                event = self._look_at_call(
                    event, known, function, (args, kwargs), made, trip
                )
            if not self.full:  # with that call begins a step that is not looked at
                self.events.append(event)
                self._note_made(made, number, sizes)
        if self.full and (tell := self.on_full) is not None:
            self.on_full = None
            tell()

    @_safely
    def was_read(self, how: str, value: Any, seconds: float, result: Any) -> None:
        arrays = [leaf for leaf in jax.tree.leaves(value) if type(leaf) is Array]
        if not arrays:
            return
        with self._lock:
            number = len(self.events)
            self._note_seen("read", how, arrays, seconds)
            for leaf in jax.tree.leaves(result):
                # What is no copy keeps the array itself alive.
                copied = isinstance(leaf, np.ndarray) and leaf.flags.owndata
                if copied and leaf.nbytes >= _KEPT_BYTES:
                    self._made.append((weakref.ref(leaf), Alive(number, leaf.nbytes)))

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

    # --- noting ---------------------------------------------------------------------

    def _known(self, function: Any) -> _Function:
        inner = getattr(function, "_fun", None)
        key = id(function if inner is None else inner)
        if (known := self._functions.get(key)) is None:
            if inner is None and not hasattr(function, "__name__"):
                known = _Function(function, None, *anonymous())
            else:
                inner = function if inner is None else inner
                name = getattr(inner, "__name__", type(inner).__name__)
                known = _Function(
                    function, inner, name, is_operation(inner), code_of(inner)
                )
            self._functions[key] = known
        return known

    def _look_at_call(
        self,
        event: Event,
        known: _Function,
        function: Any,
        arguments: Any,
        made: list[Any],
        trip: Trip,
    ) -> Event:
        self._newest = weakref.ref(made[-1]) if made else None
        self._calls[event.place, known.code] += 1
        count = self._calls[event.place, known.code]
        self.full = count > self.limit
        if trip.slow or known.code not in self._signatures:
            event = self._look_at_trip(event, known, function, arguments, trip)
        if count <= _CLOSELY:
            event = event._replace(
                elsewhere=elsewhere(
                    arguments, getattr(function, "_fun", function), made
                )
            )
        self._note_candidates(known, arguments, made)
        return event

    def _look_at_trip(
        self, event: Event, known: _Function, function: Any, arguments: Any, trip: Trip
    ) -> Event:
        signature = signature_of(function, arguments, trip)
        before = self._signatures.get(known.code)
        self._signatures[known.code] = signature
        if known.code not in self._facts:
            with unwatched():
                self._facts[known.code] = self._facts_of(function, arguments, trip)
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
        same = self._is_same((place, name, value.name), token_of(value.value))
        return SentValue(value.name, value.described, value.bytes, same)

    def _is_same(self, key: Any, token: Any) -> bool:
        same = key in self._last_sent and self._last_sent[key] == token
        self._last_sent[key] = token
        return same

    def _note_put(self, place: Any, values: Any, made: Any, number: int) -> None:
        host = [
            value for value in values if isinstance(value, np.ndarray | float | int)
        ]
        moved = [
            value
            for value, result in zip(values, made, strict=False)
            if type(value) is Array and has_moved(value, result)
        ]
        if not host and not moved:
            return
        found = [sent("value", value) for value in host]
        tokens = [token_of(value) for value in host]
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
                        self._is_same((place, "put"), tokens),
                    ),
                )
                if found
                else (),
                moved=bool(moved),
            )
        )
        self._use(values)
        self._note_made(made, number)

    def _note_seen(self, what: str, how: str, arrays: list, seconds: float) -> None:
        place = here()
        with self._lock:
            made = max((self._maker(array) for array in arrays), default=-1)
            self._use(arrays)
            self.events.append(
                Event(
                    what=what,
                    place=place,
                    name=how,
                    thread=threading.get_ident(),
                    at=time.perf_counter(),
                    bytes=total_bytes(arrays),
                    seconds=seconds,
                    made=made,
                )
            )

    def _maker(self, array: Any) -> int:
        for number, ids in reversed(self._recent):
            if id(array) in ids:
                return number
        return -1

    def _note_made(self, made: Any, number: int, sizes: Any = None) -> None:
        self._recent.append((number, frozenset(map(id, made))))
        for leaf, size in zip(made, sizes or map(bytes_of, made), strict=False):
            if size >= _KEPT_BYTES:
                self._made.append((weakref.ref(leaf), Alive(number, size)))

    def _use(self, leaves: Any) -> None:
        """What is used after a call could not have been donated to it."""
        if self._candidates:
            for leaf in leaves:
                found = self._candidates.get(id(leaf))
                if found is not None and found.reference() is leaf:
                    del self._candidates[id(leaf)]

    def _note_candidates(self, known: _Function, arguments: Any, made: Any) -> None:
        """Large arguments that a result fits in place of, and that were not donated."""
        number = len(self.events)
        least = max(self.least_bytes, 1)
        room: collections.Counter = collections.Counter()
        for leaf in made:
            if bytes_of(leaf) >= least:
                room[leaf.shape, leaf.dtype] += 1
        if not room:
            return
        kept = []
        for path, leaf in jax.tree_util.tree_leaves_with_path(arguments):
            if bytes_of(leaf) < least:
                continue
            if leaf.is_deleted():
                room[leaf.shape, leaf.dtype] -= 1
            else:
                kept.append((path, leaf))
        for path, leaf in kept:
            if room[leaf.shape, leaf.dtype] > 0:
                room[leaf.shape, leaf.dtype] -= 1
                self._follow(
                    leaf,
                    Unused(number, argument_name(path, known.inner), bytes_of(leaf)),
                )

    def _follow(self, leaf: Any, unused: Unused) -> None:
        key = id(leaf)

        def dead(reference: Any) -> None:
            found = self._candidates.get(key)
            if found is not None and found.reference is reference:
                del self._candidates[key]
                self._unused.append(unused)

        self._candidates[key] = _Candidate(weakref.ref(leaf, dead), unused)

    # --- the ends -------------------------------------------------------------------

    def begin(self) -> None:
        """Starts to look where this thread stands."""
        self._sampler = Sampler(
            threading.get_ident(), lambda: self._newest and self._newest()
        )
        self._sampler.start()

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
            self._reused = reuse_of(error)
        self.full = True
        gc.collect()
        return Recording(
            events=tuple(self.events),
            facts=dict(self._facts),
            unused=tuple(self._unused),
            alive=tuple(alive for ref, alive in self._made if ref() is not None),
            samples=tuple(self.samples),
            warnings=tuple(self._warnings),
            reused=self._reused,
            failed=self.failed,
        )
