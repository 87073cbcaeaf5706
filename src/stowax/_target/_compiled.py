"""Lowering and compiling a jitted function for a target, present or not.

`Target.lower` and `Target.compile` come here. A program is lowered once, with the specs
put on the target's devices, and compiled by whichever compiler the target has; what
comes back gives the same answers on all of them: memory figures, text, HLO and buffer
protos.

What goes silently wrong without this: compile-only GPU devices have no memories, so JAX
drops every memory kind of a sharding over them and offloaded arrays are counted on the
device. Such targets are traced over CPU stand-ins, which have memories, and the module
is handed to the GPU's compiler (`compile_devices` below).
"""

import dataclasses
import math
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from .. import _jax_targets
from .._errors import ArgumentError, CompileError, OutOfMemoryCompileError
from .._jax_layouts import in_layout, laid_out
from ._dump import dumping, layout_in, options_of

HOST_KINDS = frozenset({"pinned_host", "unpinned_host"})
"""JAX's names of the host's memories."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompiledProgram:
    """A program compiled for a target.

    `executable` is jaxlib's object; `jax_compiled` the `jax.stages.Compiled`, which can
    be called on an attached device, or `None` for compile-only GPUs. `dumped` is the
    serialized module with its buffer assignment, if the compiler was asked for it: the
    same instructions, but libtpu dumps them before it estimates their cycles.
    `lowered` is what was compiled, with the `options` that were given to it.
    """

    target_name: str
    executable: Any
    jax_compiled: Any
    dumped: tuple[bytes, bytes] | None = None
    lowered: "LoweredProgram | None" = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def memory_analysis(self) -> Any:
        """XLA's memory figures in bytes per device.

        The attributes are those of `jax.stages.Compiled.memory_analysis()`:
        `argument_size_in_bytes`, `output_…`, `alias_…`, `temp_…`, the same with
        `host_`, and `peak_memory_in_bytes`.
        """
        return self.executable.get_compiled_memory_stats()

    def as_text(self) -> str:
        """The optimized, scheduled HLO as text."""
        return "\n\n".join(module.to_string() for module in self._modules())

    def hlo_module_protos(self) -> list[bytes]:
        """Serialized `HloModuleProto`s of the optimized, scheduled modules."""
        return [module.as_serialized_hlo_module_proto() for module in self._modules()]

    def buffer_assignment_proto(self) -> bytes | None:
        """Serialized `BufferAssignmentProto`, or `None` where there is none.

        In JAX 0.10 to 0.12 the CPU compiler gives one with its memory figures; libtpu
        and the CUDA plugin only dump it (`LoweredProgram.compile(with_layout=True)`).
        """
        if self.dumped is not None:
            return self.dumped[1]
        proto = getattr(
            self.memory_analysis(), "serialized_buffer_assignment_proto", None
        )
        return bytes(proto) if proto else None

    def _modules(self) -> Sequence[Any]:
        return self.executable.hlo_modules()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoweredProgram:
    """A program lowered for a target: StableHLO, ready to compile.

    `lowered` is the `jax.stages.Lowered`, `traced` the `jax.stages.Traced` that it
    comes from, `jitted` the function. `compile_devices` are the compile-only devices to
    compile for where the program was traced over stand-ins, else `None`.
    """

    target_name: str
    lowered: Any
    compile_devices: tuple[Any, ...] | None
    traced: Any = None
    jitted: Any = None

    def compiler_ir(self) -> Any:
        """The StableHLO module (an MLIR module object)."""
        return self.lowered.compiler_ir("stablehlo")

    def as_text(self) -> str:
        """The StableHLO module as text."""
        return self.lowered.as_text()

    def compile(
        self,
        compiler_options: dict[str, Any] | None = None,
        *,
        with_layout: bool = False,
    ) -> CompiledProgram:
        """Compiles for the target.

        **Arguments:** `compiler_options` are XLA's, as `jax.jit` takes them. With
        `with_layout` the compiler also writes down where every array lies, which takes
        it a little longer (`_dump`).

        **Raises:** `OutOfMemoryCompileError` with the compiler's figures,
        `CompileError` with its words for everything else.
        """
        options = dict(compiler_options or {})
        try:
            with dumping(options) if with_layout else nullcontext() as dump:
                compiled, executable = self._compile({**options, **options_of(dump)})
                layout = layout_in(dump)
        except jax.errors.JaxRuntimeError as error:
            if self._is_untunable(str(error)) and not _WITHOUT_TRITON.keys() & options:
                again = {**options, **_WITHOUT_TRITON}
                return self.compile(again, with_layout=with_layout)
            raise _compile_error(self.target_name, str(error)) from error
        return CompiledProgram(
            target_name=self.target_name,
            executable=executable,
            jax_compiled=compiled,
            dumped=layout,
            lowered=self,
            options=options,
        )

    def _is_untunable(self, message: str) -> bool:
        """Whether a compiler without a GPU chose a way for a product that has none."""
        return self.compile_devices is not None and _NO_TILES in message

    def _compile(self, options: dict[str, Any]) -> tuple[Any, Any]:
        if self.compile_devices is None:
            compiled = self.lowered.compile(options or None)
            return compiled, compiled.runtime_executable()
        return None, _jax_targets.compile_module(
            self.lowered, self.compile_devices, options or None
        )


_NO_TILES = "Couldn't find output tile sizes"
_WITHOUT_TRITON = {"xla_gpu_enable_triton_gemm": False}
"""For products that XLA cannot tile (JAX 0.10: ViT-g/14 with its weights on the host).

With a GPU attached the autotuner passes over such a way; without one XLA takes the
first that looks right, and gives up. Without Triton products are cuBLAS's.
"""

_NUMBER = r"([\d.]+)\s*([KMGT]?)(?:i?B)?"
# libtpu since 2025 says the first, before that (and XLA's allocator still) the second.
_OUT_OF_MEMORY = (
    re.compile(rf"memory required[^(]*\({_NUMBER}\)[^(]*\({_NUMBER}\)"),
    re.compile(rf"Used {_NUMBER} of {_NUMBER} hbm"),
)


def _compile_error(target_name: str, message: str) -> CompileError:
    """The compiler's exception as ours; figures are read from its words."""
    out_of_memory = "CompileTimeHbmOom" in message or (
        "RESOURCE_EXHAUSTED" in message and "memory" in message
    )
    if not out_of_memory:
        return CompileError(f"The compiler for {target_name} refused: {message}")
    needed = available = None
    for pattern in _OUT_OF_MEMORY:
        if match := pattern.search(message):
            needed = _bytes_of(match.group(1), match.group(2))
            available = _bytes_of(match.group(3), match.group(4))
            break
    return OutOfMemoryCompileError(
        f"The program does not fit on {target_name}: {message}", needed, available
    )


def _bytes_of(number: str, letter: str) -> int:
    # XLA's "G" in these messages is 2**30.
    return math.ceil(float(number) * 1024 ** " KMGT".index(letter or " "))


def lower(
    target_name: str,
    devices: tuple[Any, ...],
    compile_devices: tuple[Any, ...] | None,
    jitted: Any,
    specs: tuple[Any, ...],
) -> LoweredProgram:
    """`jitted` lowered for `devices`; see `Target.lower` for the meaning of `specs`."""
    if not hasattr(jitted, "trace"):
        raise ArgumentError(
            "jitted",
            f"{type(jitted).__name__}, which has no .trace",
            "Write target.compile(jax.jit(step), ...).",
        )
    bare = spread_specs(devices, specs, target_name)
    placed = bare if any_sharded(bare) else put_specs(devices, bare)
    try:
        traced = jitted.trace(*placed)
        lowered = _lowered(traced, target_name, compile_devices is not None)
    except ValueError as error:
        # The function's own shardings span more than the one device that specs without
        # a sharding are put on: then those decide, as for uncommitted arrays under
        # jax.jit.
        clash = ("incompatible devices", "does not match the sharding")
        if placed is bare or not any(words in str(error) for words in clash):
            raise
        traced = jitted.trace(*bare)
        lowered = _lowered(traced, target_name, compile_devices is not None)
    used = _jax_targets.lowered_devices(lowered)
    _check_devices("jitted", used, devices, target_name)
    if compile_devices is not None:
        compile_devices = tuple(compile_devices[devices.index(d)] for d in used)
    return LoweredProgram(
        target_name=target_name,
        lowered=lowered,
        compile_devices=compile_devices,
        traced=traced,
        jitted=jitted,
    )


def _lowered(traced: Any, target_name: str, stand_in: bool) -> Any:
    """What was traced, lowered for the devices, or for the GPUs that these stand for.

    **Raises:** `CompileError` for an operation that JAX cannot lower there.
    """
    try:
        if not stand_in:
            return traced.lower()
        with _jax_targets.lowering_over_stand_ins():
            return traced.lower(lowering_platforms=("cuda",))
    except NotImplementedError as error:
        raise CompileError(
            f"JAX cannot lower the step for {target_name}: {error}"
        ) from error


def one_device_sharding(device: Any, memory_kind: str | None = None) -> NamedSharding:
    """A sharding over one device that keeps memory kinds.

    A `NamedSharding`: with `SingleDeviceSharding` the traced types lose their memory
    space and `dynamic_update_slice` on a host buffer is refused.
    """
    mesh = Mesh(np.array([device], dtype=object), ("device",))
    return NamedSharding(mesh, PartitionSpec(), memory_kind=memory_kind)


def spread_specs(devices: tuple[Any, ...], specs: Any, target_name: str) -> Any:
    """`specs` as `ShapeDtypeStruct`s; shardings are checked, missing ones kept open.

    Leaves that are no arrays (static arguments, Python numbers) pass through.
    """

    def convert(path: Any, leaf: Any) -> Any:
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            return leaf
        sharding = getattr(leaf, "sharding", None)
        spec = jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, weak_type=getattr(leaf, "weak_type", False)
        )
        if sharding is None:
            return spec
        if isinstance(sharding, SingleDeviceSharding):
            # An array that lies somewhere by default says nothing about the target, but
            # its memory kind does.
            (device,) = sharding.device_set
            nowhere = isinstance(leaf, jax.Array) and not leaf.committed
            if nowhere and sharding.memory_kind in (None, "device", "unpinned_host"):
                return spec
            if device not in devices and not isinstance(leaf, jax.Array):
                _check_devices(_argument(path), (device,), devices, target_name)
            if device not in devices and sharding.memory_kind in (None, "device"):
                return spec
            home = device if device in devices else devices[0]
            return spec.update(sharding=one_device_sharding(home, sharding.memory_kind))
        if isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh):
            raise ArgumentError(
                _argument(path),
                "a sharding over an abstract mesh",
                f"Build the mesh with stowax.target({target_name!r}).mesh(...).",
            )
        _check_devices(_argument(path), sharding.device_set, devices, target_name)
        _check_divides(_argument(path), sharding, spec.shape)
        given = sharding if isinstance(leaf, jax.Array) else laid_out(leaf)
        return spec.update(sharding=given)

    return jax.tree_util.tree_map_with_path(convert, specs)


def put_specs(devices: tuple[Any, ...], specs: Any) -> Any:
    """`specs` with everything that has no sharding put on the first of `devices`.

    Where the types of others name a mesh of one device, it is put on that: JAX refuses
    operations on two of them.
    """
    sharding = _explicit_home(specs) or one_device_sharding(devices[0])

    def put(leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None:
            return leaf.update(sharding=sharding)
        return leaf

    return jax.tree.map(put, specs)


def _explicit_home(specs: Any) -> jax.sharding.NamedSharding | None:
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(specs))
    for sharding in shardings:
        named = isinstance(sharding, jax.sharding.NamedSharding)
        if named and sharding.mesh.abstract_mesh.explicit_axes:
            return jax.sharding.NamedSharding(
                sharding.mesh, jax.sharding.PartitionSpec()
            )
    return None


def put_in_device_memory(specs: Any) -> Any:
    """`specs` with those in host memory on the device, sharded as they are."""

    def put(spec: Any) -> Any:
        sharding = getattr(spec, "sharding", None)  # a number of Python's has none
        if sharding is None or sharding.memory_kind not in HOST_KINDS:
            return spec
        return spec.update(sharding=sharding.with_memory_kind("device"))

    return jax.tree.map(put, specs)


def put_in_host_memory(
    specs: Any, positions: Collection[int], orders: Mapping[int, Any] | None = None
) -> Any:
    """`specs` with the arrays at these flat positions in pinned host memory.

    Those in `orders` lie there with their axes so.
    """
    leaves, structure = jax.tree.flatten(specs)
    for i in positions:
        sharding = leaves[i].sharding.with_memory_kind("pinned_host")
        if order := (orders or {}).get(i):
            sharding = in_layout(sharding, order)
        spec = leaves[i]
        leaves[i] = jax.ShapeDtypeStruct(
            spec.shape, spec.dtype, sharding=sharding, weak_type=spec.weak_type
        )
    return jax.tree.unflatten(structure, leaves)


def any_sharded(specs: Any) -> bool:
    """Whether any of `specs` spans several devices, so that the rest must stay open."""
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(specs))
    return any(s is not None and len(s.device_set) > 1 for s in shardings)


def _argument(path: Any) -> str:
    return f"specs{jax.tree_util.keystr(path)}"


def _check_divides(argument: str, sharding: Any, shape: tuple[int, ...]) -> None:
    """**Raises:** `ArgumentError` for a sharding that does not split `shape` evenly."""
    try:
        sharding.shard_shape(shape)
    except ValueError as error:
        spec = getattr(sharding, "spec", sharding)
        over = dict(sharding.mesh.shape) if hasattr(sharding, "mesh") else ""
        raise ArgumentError(
            argument,
            f"shape {shape} with {spec} over a mesh {over}, which does not split it "
            "into equal parts",
            "Spread another axis, or make this one a multiple of the devices it is "
            "spread over.",
        ) from error


def _check_devices(
    argument: str, used: Any, devices: tuple[Any, ...], target_name: str
) -> None:
    foreign = sorted({str(d) for d in used if d not in devices})
    if foreign:
        raise ArgumentError(
            argument,
            f"a sharding over {', '.join(foreign[:3])}"
            + (f" and {len(foreign) - 3} more" if len(foreign) > 3 else "")
            + f", which target {target_name} does not have",
            f"Build the mesh with stowax.target({target_name!r}).mesh(...).",
        )
