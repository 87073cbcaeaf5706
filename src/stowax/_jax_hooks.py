"""The narrow points of JAX through which a running program's transfers go.

JAX's transfer guards see half of them on a CPU: a NumPy value on its way in is guarded,
reading a result is not, since the memory is shared (jax-ml/jax#16602). They name no
line, and refuse `x + 1` and `jax.numpy.zeros(3)`. So `watch` hooks what every call goes
through, in one place, for as long as somebody watches:

- `post_hook`, which the compiled fast path of every jitted function calls (also those
  that jax.numpy consists of), and `_run_python_pjit`, where a call goes that is new;
- `Array._value`, which every read of an array ends in, but for the buffer protocol of
  CPU arrays: that is used by `numpy.asarray`, `numpy.array`, `.item()`, and NumPy's
  other functions (`_numpy_hooks`);
- `_batched_device_put_impl`, `jax.device_get`, `block_until_ready`;
- `jax.monitoring`, for the seconds that compilation took.

Served: JAX 0.10 to 0.12.
"""

import contextlib
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax._src import api as _api
from jax._src import array as _array
from jax._src import config as _config
from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src import pjit as _pjit
from jax._src import stages as _stages
from jax._src import traceback_util as _traceback_util

from . import _numpy_hooks
from ._jax import argument_names
from ._watcher import FAST, Trip, Watcher

Array = _array.ArrayImpl
_COMPILED = "/jax/core/compile/backend_compile_duration"


for _file in (__file__, _numpy_hooks.__file__):
    # What stands between a user's line and JAX is as little theirs as JAX's own.
    _traceback_util.register_exclusion(_file)

_lock = threading.RLock()
_watchers: tuple[Watcher, ...] = ()
_only: int | None = None
_undo: list[Callable[[], None]] = []


class _Thread(threading.local):
    inside = False  # what happens in here is a part of what was seen already
    trip: Trip | None = None
    reads = 0
    in_numpy = False


_thread = _Thread()


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """What this thread does in here is nobody's."""
    before, _thread.inside = _thread.inside, True
    try:
        yield
    finally:
        _thread.inside = before


@contextlib.contextmanager
def watch(watcher: Watcher) -> Iterator[None]:
    """Tells `watcher` what every thread does with JAX meanwhile (JAX 0.10 to 0.12)."""
    global _watchers, _only
    with _lock:
        if not _watchers:
            _install()
        _watchers, _only = (*_watchers, watcher), None
    try:
        yield
    finally:
        with _lock:
            _watchers, _only = tuple(w for w in _watchers if w is not watcher), None
            if not _watchers:
                while _undo:
                    _undo.pop()()


def listen_only_to(watcher: Watcher, function: int | None) -> None:
    """Of calls on the fast path, `watcher` wants only those of one function, by its id.

    Until it says `None`; where somebody else watches, too, nothing changes.
    """
    global _only
    with _lock:
        if _watchers == (watcher,):
            _only = function


def _forget() -> None:
    """In a copy of the process, nobody watches: what it does is its own."""
    global _watchers
    _watchers = ()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def _replace(owner: Any, name: str, value: Any) -> None:
    before = getattr(owner, name) if not isinstance(owner, type) else vars(owner)[name]
    setattr(owner, name, value)

    def undo() -> None:
        # Somebody who replaced it since is left alone.
        now = vars(owner).get(name)
        if now is value:
            setattr(owner, name, before)

    _undo.append(undo)


def _install() -> None:
    state = _PostHook(_api._post_hook_state)
    state.begin()
    _api._post_hook_state = state  # pyright: ignore[reportAttributeAccessIssue]
    _undo.append(state.end)
    _replace(_pjit, "_run_python_pjit", _slow_way(_pjit._run_python_pjit))
    _replace(_stages.Compiled, "call", _ahead(_stages.Compiled.call))
    put: Any = _dispatch._batched_device_put_impl
    _replace(_dispatch, "_batched_device_put_impl", _putting(put))
    value: Any = vars(Array)["_value"]
    _replace(Array, "_value", property(_reading("value", value.fget)))
    _replace(Array, "item", _reading("item", Array.item))
    for name in ("asarray", "array"):
        _replace(np, name, _reading(name, getattr(np, name)))
    _replace(jax, "device_get", _reading("device_get", jax.device_get))
    _replace(Array, "block_until_ready", _waiting(Array.block_until_ready))
    _replace(jax, "block_until_ready", _waiting(jax.block_until_ready))
    _undo.append(_numpy_hooks.install(Array, _numpy_reads))
    _replace(warnings, "warn", _warning(warnings.warn))
    jax.monitoring.register_event_duration_secs_listener(_duration)
    _undo.append(lambda: jax.monitoring.unregister_event_duration_listener(_duration))


class _PostHook:
    """JAX's setting for the hook, with ours behind whatever JAX sets.

    JAX sets it to check for NaNs, and clears it for one thread whenever it leaves a
    context of its own without those checks, which would hide a hook for all threads.
    """

    def __init__(self, state: Any):
        self._state = state
        self._unset = _config.config_ext.unset
        self._global: Any = None

    def begin(self) -> None:
        """Sets our hook behind the one there is."""
        self._global = self._state.get_global()
        self.set_global(self._global)
        self.set_local(self._state.get_local())

    def end(self) -> None:
        """JAX's own setting is as JAX would have it; a thread may keep a hook of ours.

        That tells nobody then.
        """
        self._state.set_global(self._global)
        _api._post_hook_state = self._state

    def set_global(self, hook: Any) -> None:
        """What JAX calls for all threads."""
        self._global = hook
        self._state.set_global(_behind(hook))

    def set_local(self, hook: Any) -> None:
        """What JAX calls for this thread."""
        if hook is None or hook is self._unset:
            self._state.set_local(self._unset)
        else:
            self._state.set_local(_behind(hook))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)


def _behind(hook: Any) -> Any:
    if hook is None:
        return _after

    def post(function: Any, args: Any, kwargs: Any, results: Any) -> None:
        with unwatched():  # it reads all results
            hook(function, args, kwargs, results)
        _after(function, args, kwargs, results)

    return post


def _duration(event: str, duration_secs: float, **_: Any) -> None:
    if event == _COMPILED and (trip := _thread.trip) is not None:
        trip.compiled_seconds += duration_secs


def _after(function: Any, args: Any, kwargs: Any, results: Any) -> None:
    """What the fast path calls when it has dispatched a function."""
    if _only is not None and id(function) != _only:
        return
    if _thread.inside or not _core.trace_state_clean():
        return
    _thread.inside = True
    try:
        for watcher in _watchers:
            watcher.ran(function, args, kwargs, results, FAST)
    finally:
        _thread.inside = False


class _telling:
    """Watchers are told of an error in here."""

    def __init__(self, value: Any):
        self.value = value

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            for watcher in _watchers:
                watcher.failed_with(self.value, error)


def _ahead(call: Any) -> Any:
    """The way of a program compiled ahead of time, when it is called at first."""

    def compiled_call(*args: Any, **kwargs: Any) -> Any:
        if _thread.inside or not _core.trace_state_clean():
            return call(*args, **kwargs)
        _thread.inside = True
        try:
            with _telling((args[1:], kwargs)):
                out = call(*args, **kwargs)
            for watcher in _watchers:
                watcher.ran(args[0].executable, args[1:], kwargs, out[0], FAST)
        finally:
            _thread.inside = False
        return out

    return staticmethod(compiled_call)


def live_arrays() -> list[Any]:
    """All arrays that somebody has, on the default devices and on the host's."""
    platforms = dict.fromkeys(("cpu", jax.default_backend()))
    return [array for name in platforms for array in jax.live_arrays(name)]


def _slow_way(run: Any) -> Any:
    def run_python_pjit(
        p: Any, args_flat: Any, fun: Any, args: Any, kwargs: Any
    ) -> Any:
        if _thread.inside or not _core.trace_state_clean():
            return run(p, args_flat, fun, args, kwargs)
        before = _thread.trip
        names = argument_names(p.params["jaxpr"])
        trip = _thread.trip = Trip([*zip(names, args_flat, strict=False)], p.params)
        _thread.inside = True
        try:
            for watcher in _watchers:
                watcher.starts(fun, trip)
            with _telling(args_flat):
                out = run(p, args_flat, fun, args, kwargs)
            for watcher in _watchers:
                watcher.ran(fun, args, kwargs, out[0], trip)
        finally:
            _thread.inside, _thread.trip = False, before
        return out

    return run_python_pjit


def _reading(how: str, read: Any) -> Any:
    """`read`, and who watches is told where its argument is an array of JAX's."""
    arrays_only = how != "device_get"

    def reading(*args: Any, **kwargs: Any) -> Any:
        if (
            _thread.inside
            or not args
            or (arrays_only and type(args[0]) is not Array)
            or not _core.trace_state_clean()
        ):
            return read(*args, **kwargs)
        _thread.inside = True
        _thread.reads += 1
        try:
            if arrays_only:
                for watcher in _watchers:
                    watcher.reads(args[0])
            began = time.perf_counter()
            with _telling(args[0]):
                result = read(*args, **kwargs)
            seconds = time.perf_counter() - began
            for watcher in _watchers:
                watcher.was_read(how, args[0], seconds, result)
        finally:
            _thread.inside = False
        return result

    reading.__name__, reading.__doc__ = how, read.__doc__
    return reading


def _numpy_reads(how: str, arrays: list[Any], read: Callable[[], Any]) -> Any:
    """A NumPy function is about to read arrays, unless it asks them for the result."""
    outer = not (_thread.inside or _thread.in_numpy) and _core.trace_state_clean()
    if not outer or not arrays:
        return read()
    with unwatched(), _telling(arrays):
        began = time.perf_counter()
        jax.block_until_ready(arrays)
        seconds = time.perf_counter() - began
    before, _thread.in_numpy = _thread.reads, True
    try:
        result = read()
    finally:
        _thread.in_numpy = False
    asked = any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(result))
    if not asked and _thread.reads == before:  # else it was told already
        with unwatched():
            for watcher in _watchers:
                watcher.reads(arrays[0])
            for watcher in _watchers:
                watcher.was_read(how, arrays, seconds, result)
    return result


def _waiting(wait: Any) -> Any:
    def block_until_ready(value: Any) -> Any:
        if _thread.inside:
            return wait(value)
        _thread.inside = True
        try:
            began = time.perf_counter()
            with _telling(value):
                result = wait(value)
            seconds = time.perf_counter() - began
            for watcher in _watchers:
                watcher.waited(value, seconds)
        finally:
            _thread.inside = False
        return result

    return block_until_ready


def _putting(put: Any) -> Any:
    def impl(*values: Any, **params: Any) -> Any:
        results = put(*values, **params)
        if not _thread.inside:
            _thread.inside = True
            try:
                for watcher in _watchers:
                    watcher.put(values, results)
            finally:
                _thread.inside = False
        return results

    return impl


def _warning(warn: Any) -> Any:
    def warn_watched(
        message: Any, category: Any = None, stacklevel: int = 1, *rest: Any, **more: Any
    ) -> None:
        for watcher in _watchers:
            watcher.warned(str(message))
        warn(message, category, stacklevel + 1, *rest, **more)

    return warn_watched
