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
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import jax

from .. import _jax_targets
from .._errors import ArgumentError, CompileError, OutOfMemoryCompileError
from ._dump import dumping, layout_in, options_of
from ._specs import any_sharded, check_devices, put_specs, spread_specs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompiledProgram:
    """A program compiled for a target.

    `executable` is jaxlib's object; `jax_compiled` the `jax.stages.Compiled`, which can
    be called on an attached device, or `None` where others stood in for the target's.
    `dumped` is the serialized module with its buffer assignment, if the compiler was
    asked for it: the same instructions, but libtpu dumps them before it estimates their
    cycles.
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
        lowered = _lowered(traced, target_name, compile_devices)
    except ValueError as error:
        # The function's own shardings span more than the one device that specs without
        # a sharding are put on: then those decide, as for uncommitted arrays under
        # jax.jit.
        clash = ("incompatible devices", "does not match the sharding")
        if placed is bare or not any(words in str(error) for words in clash):
            raise
        traced = jitted.trace(*bare)
        lowered = _lowered(traced, target_name, compile_devices)
    if not isinstance(lowered, jax.stages.Lowered):
        raise ArgumentError(
            "jitted",
            f"what {type(lowered).__module__} jitted, whose programs are not jax.jit's",
            "Write target.compile(jax.jit(step), ...), or stowax.inspect, which takes "
            "what frameworks jitted.",
        )
    used = _jax_targets.lowered_devices(lowered)
    check_devices("jitted", used, devices, target_name)
    if compile_devices is not None:
        compile_devices = tuple(compile_devices[devices.index(d)] for d in used)
    return LoweredProgram(
        target_name=target_name,
        lowered=lowered,
        compile_devices=compile_devices,
        traced=traced,
        jitted=jitted,
    )


def _lowered(traced: Any, target_name: str, instead: Sequence[Any] | None) -> Any:
    """What was traced, lowered for its devices, or for those that they stand for.

    **Raises:** `CompileError` for an operation that JAX cannot lower there.
    """
    traced = _jax_targets.with_lenient_arguments(traced)
    try:
        if not instead:
            return traced.lower()
        with _jax_targets.lowering_over_stand_ins():
            platform = "tpu" if instead[0].platform == "tpu" else "cuda"
            return traced.lower(lowering_platforms=(platform,))
    except NotImplementedError as error:
        raise CompileError(
            f"JAX cannot lower the step for {target_name}: {error}"
        ) from error
