"""What a compiled program really does: memory by kind, copies, hazards, a timeline.

`stowax.inspect` is the front door for people who place arrays by hand, and the
planner's own audit: a plan is believed when the compiled program holds it, not before.
Everything is read from the executable; nothing is run.

What goes silently wrong without it: `memory_analysis()` of a program whose products XLA
moved to the host's processor looks splendid.
"""

import dataclasses
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from .._calling._calling import as_jax_takes_it
from .._calling._known import known
from .._calling._objects import together
from .._errors import ArgumentError, CallError, OutOfMemoryCompileError
from .._files import check_writable, write_whole
from .._hardware._hardware import CHIPS, chip_of_kind
from .._hazards import Machine, find_hazards, make_context
from .._hlo._program import read_program
from .._records import _inspection
from .._records._audit import AuditRecord
from .._records._inspection import Memory, MemoryUse, Omission
from .._records._intent import Intent
from .._records._plan import PlanRecord
from .._records._program import Program
from .._step._argument_roles import argument_roles
from .._target._compiled import CompiledProgram, LoweredProgram
from .._target._foreign import stood_in
from .._target._machine import Target, make_target
from .._target._target import target as target_of_name
from .._timing._simulate import simulate
from ._intent import intent_of_compiled, intent_of_lowered
from ._ledger import copies_of, priced, serving
from ._memory_curve import read_memory
from ._peak_of import peak_of
from ._products import nominal_seconds, products_of
from ._refused import refused_inspection


class Inspection(_inspection.Inspection):
    """What `stowax.inspect` found; `print` shows what the command line does."""

    __slots__ = ()

    def __str__(self) -> str:
        from ..report import inspection_text

        return inspection_text(self)

    def _repr_html_(self) -> str:
        from ..report import inspection_html

        return inspection_html(self)

    def to_html(
        self,
        path: str | os.PathLike[str],
        plan: PlanRecord | None = None,
        audit: AuditRecord | None = None,
    ) -> None:
        """Writes the inspection as one page for a browser, which needs no network.

        **Arguments:** `plan` is what the step was compiled under, if it was: its
        budget and its decisions are shown too. `audit` is the `record` of an audit of
        the loop around the step.

        **Raises:** `ArgumentError` if nothing can be written there;
        `MissingExtraError` without the extra `[report]`.
        """
        from ..report import inspection_page

        check_writable(path, "path")
        write_whole(path, inspection_page(self, plan, audit))


def load_inspection(path: str | os.PathLike[str]) -> Inspection:
    """An inspection from a file that `stowax inspect --json` or `to_json` wrote.

    **Raises:** `ArgumentError` for a file that is missing, damaged, no inspection, or
    one of another version of stowax.
    """
    got = repr(os.fspath(path))
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ArgumentError(
            "path",
            f"{got}, which cannot be read ({reason})",
            "Give a file that `stowax inspect --json` wrote.",
        ) from None
    return Inspection._read(text, "path", got)


def inspect(
    jitted_or_compiled: Any,
    *args: Any,
    target: Target | str | None = None,
    **kwargs: Any,
) -> Inspection:
    """What a step does once it is compiled: `stowax.inspect`, but for ways to fit.

    Of a program that the compiler refuses for want of memory it has no more than the
    prediction: `fits` is false, and `peak` has the arrays that are in the way, as it
    has wherever the step does not fit.

    >>> step = jax.jit(lambda x: jax.numpy.sin(x) @ x)
    >>> x = jax.ShapeDtypeStruct((256, 256), "float32")
    >>> inspect(step, x, target="v5e-4").memory.device.argument
    262144
    """
    machine = target_of_name(target) if isinstance(target, str) else target
    if machine is not None and not isinstance(machine, Target):
        raise ArgumentError(
            "target", type(target).__name__, "Write a name such as 'v5p-8'."
        )
    if isinstance(jitted_or_compiled, CompiledProgram | jax.stages.Compiled):
        leave_out = "Leave them out: what is compiled has its arguments."
        if args:
            got = f"{len(args)} beside a compiled program"
            raise ArgumentError("args", got, leave_out)
        for name, value in kwargs.items():
            raise CallError(name, f"{value!r:.60}", leave_out).near(["target"])
        compiled = jitted_or_compiled
        machine = _same_machine(machine, _machine_of(compiled, machine))
    else:
        machine, program = _lower(jitted_or_compiled, args, kwargs, machine)
        options = getattr(jitted_or_compiled, "stowax_compiler_options", None)
        # The CPU's compiler tells where arrays lie with its memory figures.
        layout = machine.platform != "cpu"
        try:
            compiled = program.compile(options, with_layout=layout)
        except OutOfMemoryCompileError as error:
            known = _roles_of(_plan_of(program))
            fields: Any = refused_inspection(program, machine, error, known)
            return Inspection(**fields)
    lowered = compiled.lowered if isinstance(compiled, CompiledProgram) else None
    plan = _plan_of(lowered)
    found = inspect_program(
        _program(compiled),
        compiled.memory_analysis(),
        machine,
        _intent(compiled, lowered, machine),
    )
    if plan is not None:
        transfers = serving(found.transfers, plan)
        found = dataclasses.replace(
            found, transfers=transfers, copies=copies_of(transfers, plan)
        )
    roles = _roles_of(plan)
    arguments = argument_roles(lowered.traced, roles) if lowered else {}
    limit = plan.budget_bytes if plan else machine.device_bytes
    if lowered is not None and found.memory.device.total > limit:
        _, peak = peak_of(lowered, machine.platform, roles)
        found = dataclasses.replace(found, peak=peak)
    return _with_memory(found, compiled, machine, arguments)


def _plan_of(lowered: LoweredProgram | None) -> PlanRecord | None:
    """The plan that a program was made under, if one was."""
    return getattr(lowered.jitted, "stowax_plan", None) if lowered else None


def _roles_of(plan: PlanRecord | None) -> tuple[str, ...]:
    """What a plan says that the step's arguments are for."""
    return tuple(argument.role for argument in plan.program.arguments) if plan else ()


def _lower(
    jitted: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    machine: Target | None,
) -> tuple[Target, LoweredProgram]:
    """The function, lowered for a machine, by default the attached one.

    **Raises:** `CallError` for a name that neither it nor `inspect` has.
    """
    if isinstance(jitted, jax.stages.Lowered):
        raise ArgumentError(
            "jitted_or_compiled",
            "Lowered, which is not compiled",
            "Write stowax.inspect(lowered.compile()), or give the jitted function and "
            "its arguments.",
        )
    frameworks = callable(jitted) and known(jitted).jitted
    if not hasattr(jitted, "trace") and not frameworks:
        raise ArgumentError(
            "jitted_or_compiled",
            type(jitted).__name__,
            "Write stowax.inspect(jax.jit(step), ...).",
        )
    with together():
        try:
            function, arrays = as_jax_takes_it(jitted, args, kwargs)
        except CallError as error:
            raise error.near(["target"]) from None
        machine = stood_in(machine or target_of_name(None), arrays)
        return machine, _lowered(machine, function, arrays)


def _intent(
    compiled: CompiledProgram | jax.stages.Compiled,
    lowered: LoweredProgram | None,
    machine: Target,
) -> Intent:
    """What was asked for, as far as what there is knows it."""
    if isinstance(compiled, CompiledProgram) and lowered is not None:
        return intent_of_lowered(lowered, compiled.options, machine.chip)
    return intent_of_compiled(compiled)


def _lowered(machine: Target, jitted: Any, args: tuple[Any, ...]) -> LoweredProgram:
    """`jitted` for the machine; an error names the argument as `inspect` knows it."""
    try:
        return machine.lower(jitted, *args)
    except ArgumentError as error:
        name = error.argument.replace("specs[", "args[", 1)
        name = "jitted_or_compiled" if name == "jitted" else name
        raise ArgumentError(name, error.got, error.instead) from None


def inspect_program(
    program: Program, memory: Any, machine: Target, intent: Intent | None = None
) -> Inspection:
    """The inspection of a program that is read already.

    **Arguments:** `memory` is what `memory_analysis()` of the executable returned,
    `intent` what is known of what the step asked for.

    **Raises:** `ArgumentError` for a program that is not scheduled.
    """
    if not program.scheduled:
        raise ArgumentError(
            "jitted_or_compiled",
            f"{program.name}, a program without a schedule",
            "Compile it for the target: stowax.inspect(jax.jit(step), *args, "
            "target='v5p-8').",
        )
    duplex = machine.duplex
    timeline = simulate(program, machine.chip, machine.link, duplex=duplex)
    used = memory_of(memory)
    place = Machine(
        platform=machine.platform,
        device_bytes=machine.device_bytes,
        host_bytes=machine.host_bytes,
        pinned_bytes=machine.pinned_bytes,
        attached=not machine.compile_only,
    )
    hazards, not_looked_for = find_hazards(
        make_context(program, timeline, machine.link, used, place, intent or Intent())
    )
    unread = (Omission(what="the program", reason=line) for line in program.unread)
    products = products_of(program)
    return Inspection(
        target=machine.name,
        program=program.name,
        memory=used,
        transfers=priced(program.transfers, timeline, machine.link),
        hazards=hazards,
        timeline=timeline,
        flops=sum(products.values()),
        nominal_seconds=nominal_seconds(products, machine.chip),
        omissions=(*unread, *not_looked_for),
        capacity_bytes=machine.device_bytes,
    )


def memory_of(analysis: Any) -> Memory:
    """XLA's memory figures by kind; `analysis` is a `memory_analysis()`.

    **Raises:** `ArgumentError` where the backend gives none.
    """
    if analysis is None:
        raise ArgumentError(
            "jitted_or_compiled",
            "a program without memory figures",
            "Compile it for a TPU, a GPU or a CPU.",
        )

    def use(prefix: str) -> MemoryUse:
        return MemoryUse(
            argument=int(getattr(analysis, f"{prefix}argument_size_in_bytes")),
            output=int(getattr(analysis, f"{prefix}output_size_in_bytes")),
            alias=int(getattr(analysis, f"{prefix}alias_size_in_bytes")),
            temp=int(getattr(analysis, f"{prefix}temp_size_in_bytes")),
        )

    return Memory(device=use(""), host=use("host_"))


def _module(compiled: CompiledProgram | jax.stages.Compiled) -> bytes:
    if isinstance(compiled, CompiledProgram):
        return compiled.hlo_module_protos()[0]
    executable: Any = compiled.runtime_executable()
    return executable.hlo_modules()[0].as_serialized_hlo_module_proto()


def _program(compiled: CompiledProgram | jax.stages.Compiled) -> Program:
    return read_program(_module(compiled))


def _with_memory(
    found: Inspection,
    compiled: CompiledProgram | jax.stages.Compiled,
    machine: Target,
    arguments: Mapping[str, str],
) -> Inspection:
    """The inspection with what lies in memory over the step, if the compiler told."""
    analysis, module = compiled.memory_analysis(), _module(compiled)
    if isinstance(compiled, CompiledProgram):
        assignment = compiled.buffer_assignment_proto()
        module = compiled.dumped[0] if compiled.dumped else module
    else:
        assignment = getattr(analysis, "serialized_buffer_assignment_proto", None)
    if not assignment:
        omission = Omission(
            what="memory over the step",
            reason=(
                "the compiler did not write down where arrays lie. Give "
                "stowax.inspect the jitted function and its arguments, not what is "
                "compiled, leave the option xla_dump_to to it, and let it have a "
                "temporary folder (TMPDIR)."
            ),
        )
        return dataclasses.replace(found, omissions=(*found.omissions, omission))
    timeline = read_memory(
        module,
        bytes(assignment),
        _program(compiled),
        found.timeline,
        platform=machine.platform,
        arguments=arguments,
        compiler_peak_bytes=int(getattr(analysis, "peak_memory_in_bytes", 0)),
    )
    return dataclasses.replace(found, memory_timeline=timeline)


def _machine_of(
    compiled: CompiledProgram | jax.stages.Compiled, asked: Target | None
) -> Target | None:
    """The machine that something was compiled for, found from its devices.

    `None` where only `asked` can say whose figures to take.
    """
    if isinstance(compiled, CompiledProgram):
        return target_of_name(compiled.target_name)
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    devices = tuple(device for s in shardings for device in s.device_set)
    if not devices:
        return None if asked is not None else target_of_name(None)
    kind = devices[0].device_kind
    chip = chip_of_kind(kind) or (CHIPS["cpu"] if kind == "cpu" else None)
    if chip is None:
        if asked is not None:
            return None
        raise ArgumentError(
            "target",
            f"None, and {kind} is not in the hardware table",
            "Write the name of the target whose figures to take.",
        )
    return make_target(kind, chip, devices, attached=chip.platform == "cpu")


def _same_machine(asked: Target | None, found: Target | None) -> Target:
    """The machine that was asked for, if the program was compiled for its chip."""
    if asked is None or found is None:
        machine = asked or found
        assert machine is not None
        return machine
    if asked.chip.key != found.chip.key:
        raise ArgumentError(
            "target",
            f"{asked.name}, and the program was compiled for {found.name}",
            "Leave target out; or give the jitted function and its arguments, to "
            f"compile it for {asked.name}.",
        )
    return asked
