"""Every use of private JAX in stowax, each shim with the versions it serves.

Nothing else in the package may import `jax._src`, `jax.extend`, `jax.experimental` or
the insides of jaxlib (a test reads the imports). What JAX promises is used directly
elsewhere.
"""

import contextlib
import pathlib
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import compute_on as _compute_on
from jax._src import config as _config
from jax._src import core as _core
from jax._src import source_info_util as _source_info
from jax._src import util as _util
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.lax import lax as _lax

# --- jaxprs -------------------------------------------------------------------------

# From `_core`, not from `jax.extend.core`, which loads pallas on its way.
Literal = _core.Literal
Var = _core.Var
Jaxpr = _core.Jaxpr
Trace = _core.Trace
ClosedJaxpr: Any = getattr(_core, "ClosedJaxpr", Jaxpr)  # one kind from JAX 0.12 on


def consts_of(jaxpr: Any) -> Sequence[Any]:
    """Values of `constvars`; none for an open jaxpr (of JAX 0.10 and 0.11)."""
    return getattr(jaxpr, "consts", ())


def open_jaxpr(jaxpr: Any) -> Any:
    """The part with `invars`, `eqns`, `outvars` (JAX 0.12: the jaxpr itself)."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def jaxprs_in(params: Mapping[str, Any]) -> Iterator[Any]:
    """The jaxprs among an equation's parameters, opened."""
    for value in params.values():
        for part in value if isinstance(value, tuple | list) else (value,):
            opened = open_jaxpr(part)
            if hasattr(opened, "eqns"):
                yield opened


def bind(equation: Any, inputs: Sequence[Any]) -> list[Any]:
    """Runs one equation on `inputs`, with its own source line, name stack and context.

    Serves JAX 0.10 to 0.12: there `get_bind_params` returns keywords only. Mirrors what
    JAX's own evaluator does, for one equation.
    """
    params = equation.primitive.get_bind_params(equation.params)
    with source_of(equation):
        out = equation.primitive.bind(*inputs, **params)
    return list(out) if equation.primitive.multiple_results else [out]


@contextlib.contextmanager
def source_of(equation: Any) -> Iterator[None]:
    """What is traced inside carries the source line and names of `equation`."""
    stack = _source_info.current_name_stack() + equation.source_info.name_stack
    with (
        _source_info.user_context(equation.source_info.traceback, name_stack=stack),
        equation.ctx.manager,
    ):
        yield


def bind_here(equation: Any, inputs: Sequence[Any]) -> list[Any]:
    """`bind` under the mesh that is set here, not the one of the equation."""
    params = equation.primitive.get_bind_params(equation.params)
    with _source_info.user_context(equation.source_info.traceback):
        out = equation.primitive.bind(*inputs, **params)
    return list(out) if equation.primitive.multiple_results else [out]


def context_of(equation: Any) -> contextlib.AbstractContextManager[Any]:
    """What is traced inside is traced under the settings that `equation` was."""
    return equation.ctx.manager


_OWN = str(pathlib.Path(__file__).parent)
_LIBRARIES = tuple({sysconfig.get_paths()[k] for k in ("purelib", "platlib", "stdlib")})


def source_line(equation: Any) -> tuple[str, int, str] | None:
    """File, line and function where the user wrote what became `equation`.

    Frames of stowax, and of installed libraries while any other is there (the call of
    `nn.Dense` says more than its inside), are passed over. `None` where nothing is
    known.
    """
    library = None
    for frame in _source_info.user_frames(equation.source_info.traceback):
        if frame.file_name.startswith(_OWN):
            continue
        where = (frame.file_name, frame.start_line, frame.function_name)
        if not frame.file_name.startswith(_LIBRARIES):
            return where
        library = library or where
    return library


def source_text(equation: Any) -> str:
    """`file:line` of the user's code, empty where nothing is known."""
    line = source_line(equation)
    return f"{line[0]}:{line[1]}" if line else ""


def name_stack(equation: Any) -> str:
    """The `jax.named_scope` path of an equation, such as `block/attention`."""
    return str(equation.source_info.name_stack)


def calling_classes(equation: Any) -> tuple[str, ...]:
    """The classes whose `__call__` was running where an equation was traced.

    From the outside in: `("Block", "MultiHeadAttention")`. Serves JAX 0.10 to 0.12,
    whose frames have qualified names.
    """
    names = [
        frame.function_name.removesuffix(".__call__").rpartition(".")[2]
        for frame in _source_info.user_frames(equation.source_info.traceback)
        if frame.function_name.endswith(".__call__")
        and not frame.file_name.startswith(_OWN)
    ]
    return tuple(reversed(names))


def with_outputs(jaxpr: Any, outputs: Sequence[Any]) -> Any:
    """The jaxpr with other variables of its own as results (JAX 0.10 to 0.12)."""
    opened = open_jaxpr(jaxpr)
    info = opened.debug_info.with_unknown_names()
    return opened.replace(outvars=list(outputs), debug_info=info)


def with_equations(jaxpr: Any, equations: Sequence[Any]) -> Any:
    """The jaxpr with other equations, open or closed as it is (JAX 0.10 to 0.12)."""
    opened = open_jaxpr(jaxpr)
    new = opened.replace(eqns=list(equations))
    return new if opened is jaxpr else jaxpr.replace(jaxpr=new)


def needed_part(jaxpr: Any) -> Any:
    """The jaxpr without what no result needs, loops included; the same inputs."""
    opened = open_jaxpr(jaxpr)
    used = [True] * len(opened.outvars)
    return _partial_eval.dce_jaxpr(opened, used, instantiate=True)[0]


def argument_names(jaxpr: Any) -> Sequence[str]:
    """What a program's arguments are called, such as `state['w']` (JAX 0.10 to 0.12).

    The same names as in the compiled program; empty where JAX kept none.
    """
    return tuple(open_jaxpr(jaxpr).debug_info.arg_names or ())


def argument_path(path: Sequence[Any]) -> str:
    """`args[0]['w']` of the path of an array in the tuple of a step's arguments."""
    first, *rest = path
    return f"args[{first.idx}]{jax.tree_util.keystr(tuple(rest))}"


def scan_counts(equation: Any) -> tuple[int, int]:
    """Numbers of constants and of carried values of a `scan` equation.

    JAX 0.10 and 0.11 say so in its parameters; 0.12 keeps a tree of its inputs instead.
    """
    params = equation.params
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    parts = params["ft_in"].update(range(len(equation.invars))).unpack()
    consts, carry, _ = (list(part) for part in parts)
    return len(consts), len(carry)


def jit_is_disabled() -> bool:
    """Whether `jax.disable_jit` is in effect (JAX 0.10 to 0.12)."""
    return bool(getattr(jax.config, "jax_disable_jit"))  # noqa: B009


def is_tracer(value: Any) -> bool:
    """Whether `value` belongs to a trace under way."""
    return isinstance(value, _core.Tracer)


def trace_context() -> tuple[Any, object]:
    """What JAX's traces depend on beside their arguments.

    First its settings (mesh, precision, types), then what is another object after
    `jax.clear_caches`, which makes JAX trace again what it has traced (JAX 0.10 to
    0.12).
    """
    return _config.trace_context(), _epoch()


# JAX forgets it with all else that `jax.clear_caches` clears.
_epoch = _util.cache(max_size=1, trace_context_in_key=False)(object)


def is_tracing() -> bool:
    """Whether what is called here is a part of what JAX traces (JAX 0.10 to 0.12).

    Whatever its arguments are: it may close over what is traced around it.
    """
    return not _core.trace_state_clean()


def under_vmap() -> bool:
    """Whether the innermost trace under way is `jax.vmap`'s (JAX 0.10 to 0.12)."""
    return isinstance(_core.trace_ctx.trace, _batching.BatchTrace)


def has_effects(equation: Any) -> bool:
    """Whether running the equation twice could be noticed (printing, callbacks, …).

    What names an axis of `jax.shard_map` (`jax.lax.psum`) has an effect for JAX, and
    computes the same each time (JAX 0.10 to 0.12).
    """
    return any(not isinstance(e, _core.NamedAxisEffect) for e in equation.effects)


def aval_of(value: Any) -> Any:
    """Shape, dtype, sharding and memory space of a value (JAX 0.10 to 0.12)."""
    return _core.typeof(value)


def dtype_in_jit(dtype: Any) -> Any:
    """The dtype that `jax.jit` makes of an argument's: NumPy's int64 becomes int32."""
    if jax.numpy.issubdtype(dtype, jax.dtypes.extended):
        return dtype
    return jax.dtypes.canonicalize_dtype(dtype)


def explicit_sharding(aval: Any, leading: int = 0) -> Any:
    """How an array is spread by its type, after some leading axes that are whole.

    `None` where the type does not say: on no mesh, or over axes that the compiler
    partitions by itself (JAX 0.10 to 0.12).
    """
    mesh, spec = aval.sharding.mesh, aval.sharding.spec
    if mesh.empty or not mesh.explicit_axes:
        return None
    parts = jax.sharding.PartitionSpec(*[None] * leading, *spec)
    return jax.sharding.NamedSharding(mesh, parts)


def may_be_spread(aval: Any) -> bool:
    """Whether an array of this type may lie on several devices, a part on each.

    Inside of `jax.shard_map` an array is one device's own (JAX 0.10 to 0.12).
    """
    mesh = aval.sharding.mesh
    return any(n > 1 for name, n in mesh.shape.items() if name not in mesh.manual_axes)


def zeros(aval: Any, dtype: Any = None) -> Any:
    """Zeros of a type, or of the like with another `dtype` (JAX 0.10 to 0.12)."""
    sharding = explicit_sharding(aval)
    made = jax.numpy.zeros(aval.shape, dtype or aval.dtype, device=sharding)
    return varying_as(made, aval)


def varying_as(value: Any, aval: Any) -> Any:
    """A value of which the type says, as `aval`, over which manual axes it differs.

    Inside of `jax.shard_map` JAX checks that, and what is made of numbers is the same
    on every device (JAX 0.10 to 0.12).
    """
    axes = aval.manual_axis_type.varying - aval_of(value).manual_axis_type.varying
    return jax.lax.pcast(value, tuple(sorted(axes)), to="varying") if axes else value


def barrier(tree: Any) -> Any:
    """`jax.lax.optimization_barrier` that leaves types as they are (JAX 0.10 to 0.12).

    Inside of `jax.shard_map` JAX's makes what is the same on every device differ. What
    differs over other axes stands behind a barrier of its own here.
    """
    leaves, structure = jax.tree.flatten(tree)
    alike: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        alike.setdefault(aval_of(leaf).manual_axis_type, []).append(i)
    for numbers in alike.values():
        behind = jax.lax.optimization_barrier([leaves[i] for i in numbers])
        for i, leaf in zip(numbers, behind, strict=True):
            leaves[i] = leaf
    return jax.tree.unflatten(structure, leaves)


def partitioned_by_compiler(
    function: Callable[..., Any], results: Any
) -> Callable[..., Any]:
    """`function`, inside of which types do not say how arrays are spread.

    With the axes that `jax.make_mesh` makes they do, and JAX refuses operations whose
    result it cannot tell a type of: a slice of a part of a spread axis, say. The
    compiler can partition these. `results` are the shardings of what comes out. JAX
    0.10 to 0.12.
    """

    def run(*values: Any) -> Any:
        meshes = [aval_of(v).sharding.mesh for v in jax.tree.leaves(values)]
        mesh = next((m for m in meshes if m.explicit_axes), None)
        if mesh is None:
            return function(*values)
        with jax.sharding.use_abstract_mesh(mesh):
            return jax.sharding.auto_axes(
                function, axes=mesh.explicit_axes, out_sharding=results
            )(*values)

    return run


def in_host_memory(value: Any) -> bool:
    """Whether a value's type says that it is in host memory (JAX 0.10 to 0.12)."""
    return is_host_type(aval_of(value))


def is_host_type(aval: Any) -> bool:
    """Whether a type says that it is of something in host memory (JAX 0.10 to 0.12)."""
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def retype(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, traced as if `jax.disable_jit` were not in effect.

    Under `disable_jit` a scan is unrolled while it is traced, and the repeated body
    that a plan speaks of would be gone.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        with jax.disable_jit(False):
            return function(*args, **kwargs)

    return run


def empty_on_host(shape: Sequence[int], dtype: Any, sharding: Any = None) -> Any:
    """Host memory for an array, not `jax.lax.empty` moved there (JAX 0.10 to 0.12).

    `sharding` is that of its type, where types have one (`explicit_sharding`). Random
    keys have no such primitive, and outside of a trace an array is where it is.
    """
    plain = jax.lax.empty(tuple(shape), dtype, out_sharding=sharding)
    if not is_tracer(plain) or jax.numpy.issubdtype(dtype, jax.dtypes.extended):
        return jax.device_put(plain, jax.memory.Space.Host)
    number = _lax.empty2(np.dtype(dtype), memory_space=jax.memory.Space.Host)
    return broadcast(number, shape, sharding)


def broadcast(number: Any, shape: Sequence[int], sharding: Any) -> Any:
    """`number` everywhere in a shape; `sharding` is that of its type, or `None`.

    A number is on no mesh: from JAX 0.11 on, `jax.lax.broadcast` then drops what it is
    told of one, unless the mesh is set (JAX 0.10 to 0.12).
    """
    if sharding is None:
        return jax.lax.broadcast(number, tuple(shape))
    with jax.sharding.use_abstract_mesh(sharding.mesh):
        return jax.lax.broadcast(number, tuple(shape), out_sharding=sharding)


def compute_on_host(jaxpr: Any, inputs: Sequence[Any], on_device: int) -> list[Any]:
    """Runs `jaxpr` on the host's processor; of its results the first few come back.

    `jaxpr` is traced as if all were on the device: `compute_on` itself refuses what a
    function makes (device memory) beside its inputs (host memory). `on_device` results
    go to the device, the others stay. JAX 0.10 to 0.12.
    """
    host, memory = len(open_jaxpr(jaxpr).outvars) - on_device, jax.memory.Space
    spaces = [memory.Device] * on_device + [memory.Host] * host
    return _compute_on.compute_on_p.bind(
        *inputs,
        jaxpr=jaxpr,
        compute_type="device_host",
        out_memory_spaces=tuple(spaces),
        compiler_options_json=None,
    )


def numbers_of_checks(error: Any) -> tuple[Any, ...]:
    """The arrays of a `checkify.Error` that say which check failed, as JAX counts them.

    JAX 0.10 to 0.12 have no public way to them.
    """
    return tuple(error._code.values())
