"""Every use of private JAX in stowax, each shim with the versions it serves.

Nothing else in the package may import `jax._src`, `jax.extend`, `jax.experimental` or
the insides of jaxlib (a test reads the imports). What JAX promises is used directly
elsewhere.
"""

import contextlib
import importlib
import os
import pathlib
import sysconfig
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import cloud_tpu_init as _cloud_tpu_init
from jax._src import compiler as _compiler
from jax._src import compute_on as _compute_on
from jax._src import config as _config
from jax._src import core as _core
from jax._src import hardware_utils as _hardware_utils
from jax._src import source_info_util as _source_info
from jax._src import xla_bridge as _xla_bridge
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import pxla as _pxla
from jax._src.lax import lax as _lax
from jaxlib import _jax as _jaxlib  # pyright: ignore[reportAttributeAccessIssue]
from jaxlib import xla_client as _xla_client

from ._streams import quiet_native_log

# --- jaxprs -------------------------------------------------------------------------

# From `_core`, not from `jax.extend.core`, which loads pallas on its way.
Literal = _core.Literal
Var = _core.Var
Jaxpr = _core.Jaxpr
ClosedJaxpr: Any = getattr(_core, "ClosedJaxpr", Jaxpr)  # one kind from JAX 0.12 on


def consts_of(jaxpr: Any) -> Sequence[Any]:
    """Values of `constvars`; none for an open jaxpr (of JAX 0.10 and 0.11)."""
    return getattr(jaxpr, "consts", ())


def open_jaxpr(jaxpr: Any) -> Any:
    """The part with `invars`, `eqns`, `outvars` (JAX 0.12: the jaxpr itself)."""
    return getattr(jaxpr, "jaxpr", jaxpr)


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


def name_stack(equation: Any) -> str:
    """The `jax.named_scope` path of an equation, such as `block/attention`."""
    return str(equation.source_info.name_stack)


def argument_names(jaxpr: Any) -> Sequence[str]:
    """What a program's arguments are called, such as `state['w']` (JAX 0.10 to 0.12).

    The same names as in the compiled program; empty where JAX kept none.
    """
    return tuple(open_jaxpr(jaxpr).debug_info.arg_names or ())


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


def under_vmap() -> bool:
    """Whether the innermost trace under way is `jax.vmap`'s (JAX 0.10 to 0.12)."""
    return isinstance(_core.trace_ctx.trace, _batching.BatchTrace)


def has_effects(equation: Any) -> bool:
    """Whether running the equation twice could be noticed (printing, callbacks, …)."""
    return bool(equation.effects)


def aval_of(value: Any) -> Any:
    """Shape, dtype, sharding and memory space of a value (JAX 0.10 to 0.12)."""
    return _core.typeof(value)


def in_host_memory(value: Any) -> bool:
    """Whether a value's type says that it is in host memory (JAX 0.10 to 0.12)."""
    return aval_of(value).memory_space == jax.memory.Space.Host


def retype(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, traced as if `jax.disable_jit` were not in effect.

    Under `disable_jit` a scan is unrolled while it is traced, and the repeated body
    that a plan speaks of would be gone.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        with jax.disable_jit(False):
            return function(*args, **kwargs)

    return run


def empty_on_host(shape: Sequence[int], dtype: Any) -> Any:
    """Host memory for an array, not `jax.lax.empty` moved there (JAX 0.10 to 0.12).

    Random keys have no such primitive, and outside of a trace an array is where it is.
    """
    plain = jax.lax.empty(tuple(shape), dtype)
    if not is_tracer(plain) or jax.numpy.issubdtype(dtype, jax.dtypes.extended):
        return jax.device_put(plain, jax.memory.Space.Host)
    number = _lax.empty2(np.dtype(dtype), memory_space=jax.memory.Space.Host)
    return jax.lax.broadcast(number, tuple(shape))


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


# --- compile-only targets -----------------------------------------------------------

_REGISTRATION = threading.Lock()


def without_compilation_cache() -> contextlib.AbstractContextManager[None]:
    """Every compilation in this context is a real one (JAX 0.10 to 0.12)."""
    return _config.enable_compilation_cache(False)


def tpu_attached() -> bool:
    """Whether the PCI bus holds a TPU; touches no backend."""
    return _hardware_utils.num_available_tpu_chips_and_device_id()[0] > 0


def nvidia_gpu_attached() -> bool:
    """Whether an NVIDIA device file is there; touches no backend."""
    return _hardware_utils.has_visible_nvidia_gpu()


def has_libtpu() -> bool:
    """Whether JAX finds a libtpu to compile with."""
    return _cloud_tpu_init.get_tpu_library_path() is not None


def cuda_plugin() -> Any:
    """JAX's CUDA plugin module, or `None` where none is installed."""
    for name in ("xla_cuda12", "xla_cuda13"):
        try:
            return importlib.import_module(f"jax_plugins.{name}")
        except ImportError:
            continue
    return None


def has_libdevice(plugin: Any) -> bool:
    """Whether XLA will find NVIDIA's device library, which comes with nvcc.

    Without it a program compiles until it calls `tanh`. These are the places where XLA
    looks (its own message lists them); the first is where the wheel puts it.
    """
    site = pathlib.Path(plugin.__file__).parents[2]
    places = [site / "nvidia" / name for name in ("cuda_nvcc", "cu12", "cu13")]
    places += [pathlib.Path("/usr/local/cuda"), pathlib.Path("/opt/cuda")]
    return any((place / "nvvm" / "libdevice").is_dir() for place in places)


def _topologies() -> Any:
    from jax.experimental import topologies  # on demand: it is slow to load

    return topologies


def tpu_topology_devices(topology: str, **options: Any) -> tuple[Any, ...]:
    """Compile-only devices of a TPU slice such as `"v5p:2x2x1"` (JAX 0.10 to 0.12).

    libtpu asks its surroundings what machine it is on. Where there is no TPU nobody can
    answer, so the answers are given here, before it loads, and only those that are
    unset. They do not choose the topology: any slice can be asked for afterwards.
    """
    if not tpu_attached():
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5p-8")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        # libtpu lets one process at a time have the TPU; there is none to fight over.
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    discover_plugins()
    with quiet_native_log():
        description = _topologies().get_topology_desc(topology, "tpu", **options)
    return tuple(description.devices)


def discover_plugins() -> None:
    """Makes JAX look for its plugins, quietly on a machine that has no GPU.

    At registration the CUDA plugin looks for the CUDA runtime and gives up, with a
    traceback in the log, where there is none; compiling needs none. So the look is
    skipped, if and only if there is no GPU. JAX then leaves the plugin out of its
    backends by itself: it looks for the device files before it starts one. JAX 0.10 to
    0.12.
    """
    name = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
    skip = not nvidia_gpu_attached() and name not in os.environ
    with _REGISTRATION, quiet_native_log():
        if skip:
            os.environ[name] = "1"
        try:
            _xla_bridge._discover_and_register_pjrt_plugins()
            plugin = cuda_plugin()
            if plugin is not None and "cuda" not in _xla_bridge._topology_factories:
                # Discovered earlier, without the skip, and refused: once more.
                plugin.initialize()
        finally:
            if skip:
                del os.environ[name]


def gpu_topology_devices(
    hosts: int, per_host: int, target_config: str
) -> tuple[Any, ...]:
    """Compile-only GPUs that a `GpuTargetConfigProto` in text form describes.

    They have no memories: JAX drops every memory kind in a sharding over them. Trace
    over `stand_in_devices` instead and compile with `compile_module`. JAX 0.10 to 0.12.
    """
    discover_plugins()
    with quiet_native_log():
        description = _topologies().get_topology_desc(
            "", "cuda", topology=f"1x{hosts}x{per_host}", target_config=target_config
        )
    return tuple(description.devices)


def stand_in_devices(count: int) -> tuple[Any, ...]:
    """`count` CPU devices of a client of their own, to trace over; JAX 0.10 to 0.12.

    They have `device`, `pinned_host` and `unpinned_host` memory and belong to no
    backend: `jax.devices()` is what it was, however many CPU devices the process has.
    """
    with quiet_native_log():
        client = _xla_client.make_cpu_client(asynchronous=True, num_devices=count)
    return tuple(client.devices())


def lowered_devices(lowered: Any) -> tuple[Any, ...]:
    """The devices a `jax.stages.Lowered` was lowered for (JAX 0.10 to 0.12)."""
    return tuple(lowered._lowering._device_list)


def lowering_details(lowered: Any) -> tuple[list[int], list[Any], list[Any], dict]:
    """Kept arguments (flat positions), shardings of arguments and of results, options.

    Of a `jax.stages.Lowered` (JAX 0.10 to 0.12). What is not kept has no sharding.
    """
    lowering = lowered._lowering
    details = lowering.compile_args
    kept = sorted(details["kept_var_idx"])
    shardings: list[Any] = [None] * len(jax.tree.leaves(lowered.args_info))
    for position, sharding in zip(kept, details["in_shardings"], strict=True):
        shardings[position] = sharding
    options = dict(lowering._compiler_options_kvs)
    return kept, shardings, list(details["out_shardings"]), options


def compile_module(
    lowered: Any, devices: Sequence[Any], compiler_options: dict[str, Any] | None
) -> Any:
    """Compiles a lowered function with the client of compile-only `devices`.

    Returns jaxlib's `Executable` (memory figures, HLO; it cannot run). JAX 0.10 to
    0.12.
    """
    lowering = lowered._lowering
    arguments = lowering.compile_args
    options = _compiler.get_compile_options(
        num_replicas=1,
        num_partitions=len(devices),
        env_options_overrides=(
            dict(lowering._compiler_options_kvs) | dict(compiler_options or {})
        ),
    )
    # XLA may choose the shardings that nobody gave, as in an ordinary compile.
    to_inputs, to_outputs = _pxla.get_prop_to_input_output(
        arguments["in_shardings"],
        arguments["out_shardings"],
        len(arguments["ordered_effects"]),
    )
    build = options.executable_build_options
    build.allow_spmd_sharding_propagation_to_parameters = list(to_inputs)
    build.allow_spmd_sharding_propagation_to_output = list(to_outputs)
    return devices[0].client.compile(
        lowered.compiler_ir(), _jaxlib.DeviceList(tuple(devices)), options
    )


def arrange_devices(shape: Sequence[int], devices: Sequence[Any]) -> Any:
    """`devices` as an array of `shape`, neighbours on the chip's network kept together.

    Falls back to plain order for shapes that do not map onto the network.
    """
    try:
        from jax.experimental import mesh_utils  # on demand: it is slow to load

        return mesh_utils.create_device_mesh(tuple(shape), list(devices))
    except (NotImplementedError, ValueError, AssertionError):
        return np.array(devices, dtype=object).reshape(shape)
