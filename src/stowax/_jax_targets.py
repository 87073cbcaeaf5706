"""Private JAX for machines that need not be there: devices, lowering, compiling.

Each shim says which versions it serves.
"""

import contextlib
import copy
import importlib
import os
import pathlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import cloud_tpu_init as _cloud_tpu_init
from jax._src import compiler as _compiler
from jax._src import config as _config
from jax._src import hardware_utils as _hardware_utils
from jax._src import xla_bridge as _xla_bridge
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import pxla as _pxla
from jaxlib import _jax as _jaxlib  # pyright: ignore[reportAttributeAccessIssue]
from jaxlib import xla_client as _xla_client

from ._streams import quiet_native_log

_REGISTRATION, _LOWERING = threading.Lock(), threading.RLock()


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
        device_assignment=np.array([[device.id for device in devices]]),
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


@contextlib.contextmanager
def lowering_over_stand_ins() -> Iterator[None]:
    """Lowers for GPUs over CPU devices that stand in for them, callbacks included.

    A callback asks for the backend of the platform that it is lowered for, and JAX
    refuses where that is another one than the devices' (JAX 0.10 to 0.12). The module
    is compiled and looked at; it never runs.
    """
    checked = _mlir.ModuleContext.get_backend

    def backend(self: Any, optional: bool = False) -> Any:
        return self.backend or checked(self, optional)

    with _LOWERING:
        _mlir.ModuleContext.get_backend = backend
        try:
            yield
        finally:
            _mlir.ModuleContext.get_backend = checked


def with_lenient_arguments(traced: Any) -> Any:
    """`traced`, which can be lowered whatever classes its arguments are of.

    JAX puts notes in the place of the arguments' leaves when it lowers, and a class of
    the user's that takes arrays alone refuses those. Then the arguments are a flat
    tuple (JAX 0.10 to 0.12).
    """
    tree = getattr(traced, "_in_tree", None)
    if tree is None:  # a framework's own
        return traced
    try:
        tree.unflatten([object()] * tree.num_leaves)
        return traced
    except Exception:
        flat = copy.copy(traced)
        flat._in_tree = jax.tree.structure((tuple(range(tree.num_leaves)), {}))
        return flat
