"""Putting decisions into effect: the step as `jax.jit` would return it, plan included.

Takes plain data (what each stack stores), so that the closed loop can try decisions
that are no `Plan` yet. The step's own code is not touched: it is recorded, and the
recording is replayed with marked functions going through a `Rewriter`.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from .. import _jax
from .._errors import PlanMismatchError, StowaxError
from .._jax_donation import donate_within_memories
from .._jax_host_memory import takes_host_memory
from .._jaxprs._canonical import outline
from .._jaxprs._jaxpr import spec_of
from .._layers._boundary import Emission
from .._layers._linearize import Linearized, LinearizedBody
from .._layers._pipeline import Stack, Stored
from .._layers._rewrite import Rewriter
from .._layers._stack import STORED
from .._records._plan import ArgumentRecord
from .._records._stages import Options
from .._state._held import HeldStep
from .._state._ordered_step import OrderedStep
from .._state._shards import axes_of
from .._state._stream import Hosted, stream_state
from .._step._recording import Recording, as_written
from .._step._recording import record as record_step
from .._step._trace import available, in_order


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StackPlan:
    """What one stack stores: value number → how (`_pipeline.Stored`).

    `fingerprint` is the digest of the body that the numbers belong to, `outline` the
    body's operations, to say what is another one.
    """

    fingerprint: str
    stored: Stored
    outline: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What a plan does to a step: what each stack stores, which state the host holds.

    `hosted` has the arguments in host memory, by flat position.
    """

    stacks: Mapping[str, StackPlan]
    hosted: Hosted | None = None


def apply_decisions(
    step: Callable[..., Any] | Recording,
    plan: StepPlan | None,
    options: Options,
    *,
    donate: tuple[int, ...] = (),
    compiler_options: Mapping[str, Any] | None = None,
    label: bool = False,
    arguments: Sequence[ArgumentRecord] | None = None,
    linearized: Linearized | None = None,
    within: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
) -> Any:
    """`jax.jit(step)` under the given decisions; `None` for none at all.

    **Arguments:** a `step` that is recorded is not run again. `arguments` are those
    that the decisions were made for; `None` leaves them unchecked. `donate` has to name
    every argument with state in host memory. `linearized` has bodies that were split
    before (see `linearizer`). What `jax.jit` traces is `within` of what would be.

    **Raises:** while tracing, `PlanMismatchError` if the step is not the one that the
    decisions were made for.
    """
    written = None if isinstance(step, Recording) else step

    def jit(fun: Callable[..., Any], **more: Any) -> Any:
        program = fun if within is None else within(fun)
        if plan is not None and plan.hosted is not None:
            takes_host_memory(program)
        return jax.jit(
            program,
            donate_argnums=donate,
            compiler_options=dict(compiler_options) if compiler_options else None,
            **more,
        )

    if plan is None:
        assert written is not None, "a recording is of no use where nothing is planned"
        return jit(_checking(written, arguments, None))
    stacks = plan.stacks
    unused = set(stacks)

    def choose(stack: Stack, body: LinearizedBody) -> Stored:
        plan = stacks.get(stack.name)
        fingerprint = body.forward.fingerprint
        if plan is None or plan.fingerprint != fingerprint:
            raise PlanMismatchError(_differs(stack, body, stacks))
        check_stored(stack, body, plan.stored)
        unused.discard(stack.name)
        return plan.stored

    boundary: dict[str, Emission] | None = {} if plan.hosted else None
    rewriter = Rewriter(
        choose, options, label=label, boundary=boundary, linearized=linearized
    )

    def planned(*args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        recording = _recorded(step, leaves, structure, read=bool(stacks))
        out = recording.replay(rewriter, leaves)
        if unused:
            left = "".join(
                f" Its marked functions are not read: {r}." for r in recording.left
            )
            raise PlanMismatchError(
                f"step: it has no repeated body {', '.join(sorted(unused))}, which the "
                f"plan decides on.{left} Apply the plan to the step that it was made "
                "for, with the same function marked."
            )
        return jax.tree.unflatten(recording.outputs, out)

    _name_after(planned, step)
    if plan.hosted is None or boundary is None:
        return jit(_checking(planned, arguments, written))
    donate_within_memories()
    streaming = stream_state(planned, plan.hosted, boundary)
    whole = _checking(streaming, arguments, written)
    orders, updates = plan.hosted.orders, plan.hosted.updates
    jitted = OrderedStep(whole, orders, updates, jit) if orders else jit(whole)
    return HeldStep(jitted, donate)


def _differs(
    stack: Stack, body: LinearizedBody, planned: Mapping[str, StackPlan]
) -> str:
    """In what a repeated body differs from the planned ones, the likeliest of them."""
    mine = outline(body.forward.jaxpr)

    def alike(plan: StackPlan) -> int:
        pairs = zip(mine, plan.outline, strict=False)
        return sum(1 for _ in itertools.takewhile(lambda p: p[0] == p[1], pairs))

    text = (
        f"step: the body that repeats {stack.count} times at {stack.source} is not one "
        "that the plan was made for. "
    )
    if planned:
        nearest = max(planned.values(), key=alike)
        at, theirs = alike(nearest), nearest.outline
        if at == len(mine) == len(theirs):
            text += (
                "It has the plan's operations, and differs in what is differentiated, "
                "in what it closes over, or in how often or in which order it runs. "
            )
        else:
            here, there = ([*lines[at:], "nothing"][0] for lines in (mine, theirs))
            text += (
                f"Its operation {at} is {here!r}, and the plan has {there!r} there. "
            )
    return (
        f"{text}Apply the plan to the step that it was made for, with arguments of the "
        "same types and the same version of JAX."
    )


def _recorded(
    step: Callable[..., Any] | Recording,
    leaves: Sequence[Any],
    structure: Any,
    read: bool,
) -> Recording:
    """The recording of a step on arguments of these types.

    **Raises:** `PlanMismatchError` for one that was made on others.
    """
    if isinstance(step, Recording):
        if structure != step.inputs:
            raise PlanMismatchError(
                f"step: its arguments are of the form {structure}, and the plan was "
                f"made for {step.inputs}. Call it as it was planned; other arguments "
                "take another plan."
            )
        for leaf, variable in zip(
            leaves, _jax.open_jaxpr(step.jaxpr).invars, strict=True
        ):
            check_promoted_alike(leaf, variable.aval)
            check_spread_alike(leaf, variable.aval)
        return step
    if read:
        return record_step(step, leaves, structure)
    return as_written(step, leaves, structure)


def check_promoted_alike(leaf: Any, planned: Any) -> None:
    """**Raises:** `PlanMismatchError` for a Python number in place of an array's.

    Or the other way round: JAX promotes `bfloat16 * 0.1` to another type than
    `bfloat16 * float32(0.1)`.
    """
    found = _jax.aval_of(leaf)
    if found.weak_type != getattr(planned, "weak_type", False):
        raise PlanMismatchError(
            f"step: an argument is {found.str_short()} with weak_type="
            f"{found.weak_type}, and the plan was made for "
            f"{planned.str_short()} with weak_type={planned.weak_type}. Call it as it "
            "was planned, or plan again for these arguments."
        )


def check_spread_alike(leaf: Any, planned: Any) -> None:
    """**Raises:** `PlanMismatchError` for a type that is spread in another way."""
    found, wanted = _jax.aval_of(leaf).sharding, planned.sharding
    meshes = [sharding.mesh for sharding in (found, wanted)]
    explicit = [mesh.explicit_axes for mesh in meshes]
    if any(explicit) and (explicit[0] != explicit[1] or found.spec != wanted.spec):
        here, there = (
            f"{s.spec} over {dict(s.mesh.shape) or 'no mesh'}" for s in (found, wanted)
        )
        raise PlanMismatchError(
            f"step: an argument of {planned.str_short()} is spread as {here}, "
            f"and the plan was made for {there}. Call it as it was planned, "
            "or plan again for these arguments."
        )


def _name_after(planned: Callable[..., Any], step: Any) -> None:
    """`planned` is called in a profile and in messages what the step is called."""
    if isinstance(step, Recording):
        planned.__name__ = planned.__qualname__ = step.name.rpartition(".")[2]
    else:
        functools.update_wrapper(planned, step)


def _checking(
    step: Callable[..., Any],
    arguments: Sequence[ArgumentRecord] | None,
    written: Callable[..., Any] | None,
) -> Callable[..., Any]:
    """`step`, which looks at its arguments' shapes when it is traced, and only then.

    Where it fails and `written`, the step without the plan, does not, it is not the
    step that the plan was made for. `None`: that is sure, or is no plan's.
    """
    if arguments is None:
        return step

    @functools.wraps(step)
    def checked(*args: Any, **kwargs: Any) -> Any:
        args = in_order(step, args, kwargs)
        check_arguments(args, arguments)
        try:
            return step(*args)
        except (StowaxError, FloatingPointError):  # the second of jax.debug_nans
            raise
        except Exception as error:
            if written is not None:
                specs = [spec_of(_jax.aval_of(leaf)) for leaf in jax.tree.leaves(args)]
                plain = jax.tree.unflatten(jax.tree.structure(args), specs)
                jax.eval_shape(written, *plain)  # if it is its own, it comes again
            line = (str(error).strip().splitlines() or ["no message"])[0][:200]
            raise PlanMismatchError(
                f"step: it fails under this plan ({type(error).__name__}: {line}), and "
                "not without it. Apply the plan to the step that it was made for, with "
                "arguments that are spread as they were then."
            ) from error

    return checked


def check_arguments(args: Sequence[Any], expected: Sequence[ArgumentRecord]) -> None:
    """**Raises:** `PlanMismatchError` naming the first array that is another one."""
    leaves = jax.tree.leaves_with_path(tuple(args))
    for found, record in itertools.zip_longest(leaves, expected):
        wanted = record and f"{record.dtype}[{','.join(map(str, record.shape))}]"
        if found is None:
            raise PlanMismatchError(
                f"step: {record.path} is missing: the plan was made for {wanted} "
                "there. Call it as it was planned, or plan again for these arguments."
            )
        path, leaf = found
        aval = _jax.aval_of(leaf)
        got = f"{aval.dtype}[{','.join(map(str, aval.shape))}]"
        if got != wanted:
            name = f"args[{path[0].idx}]{jax.tree_util.keystr(path[1:])}"
            made_for = f"{wanted} ({record.path})" if record else "nothing there"
            raise PlanMismatchError(
                f"step: {name} is {got}, and the plan was made for {made_for}. Call it "
                "as it was planned, or plan again for these arguments."
            )
        _check_mesh(record, aval.sharding.mesh)
        if record.memory_kind == "device" and _jax.in_host_memory(leaf):
            raise PlanMismatchError(
                f"step: {record.path} is in host memory, and the plan has it on the "
                "device. Give what plan.place returned."
            )


def _check_mesh(record: ArgumentRecord, mesh: Any) -> None:
    """**Raises:** `PlanMismatchError` for a mesh without the axes that the plan has."""
    parts = record.partition or ()
    axes = {axis for part in parts for axis in axes_of(part)}
    if mesh.size > 1 and (missing := sorted(axes - {*mesh.axis_names})):
        raise PlanMismatchError(
            f"step: {record.path} is on a mesh with the axes "
            f"{', '.join(mesh.axis_names)}, and the plan was made for one with "
            f"{', '.join(missing)}. Name the axes as they were then, or plan anew."
        )


def check_stored(stack: Stack, body: LinearizedBody, stored: Stored) -> None:
    """**Raises:** `PlanMismatchError` for decisions that cannot be put into effect.

    The planner makes none; a plan edited by hand may.
    """
    program = body.forward
    for number, how in stored.items():
        if number not in range(len(program.avals)) or how not in STORED:
            raise PlanMismatchError(
                f"plan: stored {number}: {how!r} of {stack.name}. Write numbers of "
                f"values below {len(program.avals)}, and one of {STORED}."
            )
    moving = sorted(n for n, how in stored.items() if how != "keep")
    if stack.as_written and moving:
        raise PlanMismatchError(
            f"plan: value {moving[0]} of {stack.name} is to be offloaded, and layers "
            "that run as they are written keep and recompute only. Plan again with "
            "pin={name: 'offload'}."
        )
    at_hand = available(stack, body) | stored.keys()
    run = program.closure(body.residuals, at_hand)
    read = {*body.residuals, *(i for k in run for i in program.nodes[k].inputs)}
    missing = sorted(i for i in stack.carry_inputs if i in read - at_hand)
    if missing:
        raise PlanMismatchError(
            f"plan: value {missing[0]} of {stack.name} is not stored, and a layer's "
            "input cannot be computed again. Decide to keep it."
        )


def attach_options(jitted: Any, compiler_options: Mapping[str, Any]) -> Any:
    """`jitted`, with options that only `Target.compile` reads.

    A plan for a machine that is not there is compiled for it by `Target.compile`, and
    may be called on the attached one to check its numbers: that compiler would refuse
    options of the other.
    """
    jitted.stowax_compiler_options = dict(compiler_options)
    return jitted
