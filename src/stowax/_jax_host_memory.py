"""Arrays in host memory, computed with as if they lay on the device.

An array's type says in which memory it lies. JAX refuses to add one in host memory to
one on the device, and a TPU's compiler whatever is computed in the wrong one. A loop
that logs the norm of a moment, averages parameters, evaluates a model, knows nothing of
where a plan has put these. So once something lies in host memory, whatever computes
with it is given a copy on the device: the operation that `jax.numpy` is called for, the
function that the user has jitted, what `jax.grad` differentiates.

What is told of host memory is left alone: by its shardings, by a `jax.device_put` or
`compute_on` in it, and the programs of plans (`takes_host_memory`).

Where a function closes over such arrays, its trace may fail: then it is traced once
more (run once more, by `jax.grad` outside of `jax.jit`), as if they lay on the device
(`_as_on_device`), and copies take their places.

Not reached: what JAX traces by itself outside of `jax.jit` and `jax.grad` (`jax.vmap`,
`lax.scan`, `lax.cond`, `jax.checkpoint`, `jax.jvp`), and results in host memory of a
jitted function that JAX has traced before and that another one calls.

Served: JAX 0.10 to 0.12.
"""

import contextlib
import contextvars
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax._src import api as _api
from jax._src import array as _array
from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src import mesh as _mesh
from jax._src import pjit as _pjit
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.lax import lax as _lax

from ._errors import PlanMismatchError
from ._jax import is_tracing

_HOST = "pinned_host"
_lock = threading.Lock()
_installed = False
_programs: weakref.WeakSet[Any] = weakref.WeakSet()
# What was moved for a call: JAX must not keep its program for such a call's arguments.
_moved: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
# The copies that traced functions close over, by the array, while somebody has them.
_copies: dict[int, tuple[Any, Any]] = {}
_mindful: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
_as_on_device = contextvars.ContextVar("stowax_as_on_device", default=False)
_met = threading.local()  # how many types of such arrays were asked for


def takes_host_memory(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose arguments are left where they lie once it is jitted."""
    _programs.add(function)
    return function


def compute_on_copies() -> None:
    """From now on, what computes with arrays in host memory is given copies."""
    global _installed
    with _lock:
        if _installed:
            return
        infer: Any = _pjit._infer_params
        fast: Any = _pjit._get_fastpath_data
        vjp: Any = _api.vjp
        full_like: Any = _lax.full_like
        _pjit._infer_params = _inferring(infer)
        _pjit._get_fastpath_data = _keeping(fast)
        _api.vjp = _differentiating(vjp)  # that of `jax.grad`, and the user's own
        if jax.vjp is vjp:
            jax.vjp = _api.vjp
        _lax.full_like = _filling(full_like)  # pyright: ignore[reportAttributeAccessIssue]
        _see_as_on_device()
        dispatch: Any = _dispatch
        dispatch._device_put_sharding_impl = _putting(
            dispatch._device_put_sharding_impl
        )
        _installed = True


def _putting(original: Callable[..., Any]) -> Callable[..., Any]:
    """`jax.device_put` to a device: JAX makes no copy of what is in host memory."""

    @functools.wraps(original)
    def putting(array: Any, aval: Any, device: Any, *rest: Any) -> Any:
        if isinstance(device, jax.Device) and _in_host_memory(array):
            device = jax.sharding.SingleDeviceSharding(device)
        return original(array, aval, device, *rest)

    return putting


def _see_as_on_device() -> None:
    """Types and constants of arrays in host memory obey `_as_on_device`."""
    types: Any = _core.pytype_aval_mappings
    trace: Any = _partial_eval.DynamicJaxprTrace
    typed, constant = types[_array.ArrayImpl], trace.new_const

    def type_of(array: Any) -> Any:
        found = typed(array)
        if not _in_host_memory(array):
            return found
        _met.count = getattr(_met, "count", 0) + 1
        if _as_on_device.get():
            return found.update(memory_space=jax.memory.Space.Device)
        return found

    def new_const(self: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if _as_on_device.get() and _in_host_memory(value):
            value = _copy(value)
        return constant(self, value, *args, **kwargs)

    types[_array.ArrayImpl] = type_of
    trace.new_const = trace.pure = trace.lift = new_const


def _twice(attempt: Callable[[], Any]) -> Any:
    """What `attempt` gives; where memories do not agree, as if all were on the device.

    Only what met an array in host memory is tried again. Where memories differ for
    other reasons, too, it is the first error that is raised.
    """
    before = getattr(_met, "count", 0)
    try:
        return attempt()
    except (TypeError, ValueError) as error:
        met = getattr(_met, "count", 0) > before
        if _as_on_device.get() or not met or not _is_about_memory(error):
            raise
        first = error
    token = _as_on_device.set(True)
    try:
        return attempt()
    except (TypeError, ValueError) as error:
        if not _is_about_memory(error):  # what comes after it, of the user's own
            raise
    finally:
        _as_on_device.reset(token)
    raise first


def _is_about_memory(error: Exception) -> bool:
    return "memory_space" in str(error) or "<host>" in str(error)


def _inferring(infer: Callable[..., Any]) -> Callable[..., Any]:
    """JAX's look at the arguments of a jitted function, and its trace of it."""

    def inferring(fun: Any, info: Any, args: Any, kwargs: Any) -> Any:
        if _is_program(fun) or _is_told(info):
            return infer(fun, info, args, kwargs)
        called = sys._getframe(1).f_code.co_name == "cache_miss"
        return _twice(lambda: attempt(fun, info, args, kwargs, called))

    def attempt(fun: Any, info: Any, args: Any, kwargs: Any, called: bool) -> Any:
        whole = args, kwargs
        if not any(map(_in_host_memory, jax.tree.leaves(whole))):
            return infer(fun, info, args, kwargs)
        if not called:  # only lowered: for what it was given, or was to be given
            if _as_on_device.get():
                args, kwargs = _mapped(_spec, info, args, kwargs)
            return infer(fun, info, args, kwargs)
        try:
            found = infer(fun, info, *_mapped(_spec, info, args, kwargs))
        except PlanMismatchError:  # a plan's program within it wants what is there
            return infer(fun, info, args, kwargs)
        except (TypeError, ValueError) as error:
            moves = _is_about_memory(error) and not _as_on_device.get()
            if moves:  # by itself, what it is given: it is traced as it is
                with contextlib.suppress(TypeError, ValueError):
                    return infer(fun, info, args, kwargs)
            raise
        if _minds(found[0].params["jaxpr"]):
            with contextlib.suppress(Exception):  # it may mind something else only
                return infer(fun, info, args, kwargs)
        return infer(fun, info, *_mapped(_moved_copy, info, args, kwargs))

    return inferring


def _keeping(fast: Callable[..., Any]) -> Callable[..., Any]:
    """What JAX keeps for the next call with such arguments: nothing, of copies.

    It knows programs by where the caller's arguments lie. So these calls go through
    Python each time, and those with arrays on the device do not.
    """

    def keeping(executable: Any, out_tree: Any, args: Any, *rest: Any) -> Any:
        if any(_moved.get(id(arg)) is arg for arg in args):
            return None
        return fast(executable, out_tree, args, *rest)

    return keeping


def _differentiating(vjp: Callable[..., Any]) -> Callable[..., Any]:
    """What `jax.grad` differentiates a function by."""

    def differentiating(fun: Any, *primals: Any, **options: Any) -> Any:
        primals = jax.tree.map(_on_device, primals)
        return _twice(lambda: vjp(fun, *primals, **options))

    return differentiating


def _filling(full_like: Callable[..., Any]) -> Callable[..., Any]:
    """`full_like`, `zeros_like`: of an array in host memory JAX's own fail."""

    def filling(x: Any, *args: Any, **kwargs: Any) -> Any:
        return full_like(_spec(x) if _in_host_memory(x) else x, *args, **kwargs)

    return filling


def _in_host_memory(leaf: Any) -> bool:
    if not isinstance(leaf, jax.Array) or isinstance(leaf, _core.Tracer):
        return False
    return leaf.sharding.memory_kind == _HOST


def _is_program(fun: Any) -> bool:
    try:
        return fun in _programs
    except TypeError:  # nobody can refer to it weakly
        return False


def _is_told(info: Any) -> bool:
    """Whether `jax.jit` was told that an argument or a result lies in host memory."""
    told = (*info.in_shardings_leaves, *info.out_shardings_leaves)
    return any(getattr(s, "memory_kind", None) == _HOST for s in told)


def _mapped(
    function: Callable[[Any], Any], info: Any, args: Any, kwargs: Any
) -> tuple[Any, Any]:
    """The arguments, `function` of every array in host memory; static ones as are."""

    def mapped(leaf: Any) -> Any:
        return function(leaf) if _in_host_memory(leaf) else leaf

    static = {n + len(args) if n < 0 else n for n in info.static_argnums}
    arrays = lambda tree: jax.tree.map(mapped, tree)
    given = tuple(a if n in static else arrays(a) for n, a in enumerate(args))
    names = info.static_argnames
    return given, {k: v if k in names else arrays(v) for k, v in kwargs.items()}


def _spec(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(
        leaf.shape,
        leaf.dtype,
        sharding=leaf.sharding.with_memory_kind("device"),
        weak_type=getattr(leaf, "weak_type", False),  # keys have none
    )


def _on_device(leaf: Any) -> Any:
    return _copy(leaf) if _in_host_memory(leaf) else leaf


def _moved_copy(leaf: Any) -> Any:
    copy = _copy(leaf)
    _moved[id(copy)] = copy
    return copy


def _copy(leaf: Any) -> Any:
    tracing = is_tracing()
    owner, copy = (ref() for ref in _copies.get(id(leaf), (_nothing, _nothing)))
    if tracing and owner is leaf and copy is not None:
        return copy
    # Also for what a function closes over, and meets while it is traced, on any mesh.
    with (
        jax.ensure_compile_time_eval(),
        _mesh.use_abstract_mesh(_mesh.empty_abstract_mesh),
    ):
        copy = jax.device_put(leaf, leaf.sharding.with_memory_kind("device"))
    if tracing:  # what a call is given may be donated: that is nobody else's
        known = id(leaf)
        forget = lambda _: _copies.pop(known, None)
        _copies[known] = weakref.ref(leaf), weakref.ref(copy, forget)
    return copy


def _nothing() -> None:
    return None


def _minds(jaxpr: Any) -> bool:
    """Whether a function itself says in which memory something lies or is computed."""
    if jaxpr not in _mindful:
        _mindful[jaxpr] = any(map(_says_memory, _equations(jaxpr.jaxpr)))
    return _mindful[jaxpr]


def _equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for inner in _core.jaxprs_in_params(equation.params):
            yield from _equations(inner)


def _says_memory(equation: Any) -> bool:
    if "compute_type" in equation.params or equation.ctx.compute_type:
        return True
    params = equation.params
    places = [params.get("sharding")]
    for name in ("devices", "in_shardings", "out_shardings"):
        places.extend(params.get(name) or ())
    # Device memory is what every sharding says that is told of none.
    return any(
        isinstance(place, jax.memory.Space)
        or getattr(place, "memory_kind", None) in (_HOST, "unpinned_host")
        for place in places
    )
