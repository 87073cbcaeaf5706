"""One program under one plan beside the plain step: what came of it.

`judge` never raises what a program raises; everything it finds is in the `Verdict`.
"""

import contextlib
import dataclasses
import functools
import io
import re
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import jax

import stowax
from stowax._errors import MisfitError
from stowax._records._plan import stored_by

from .build import build, surroundings
from .choosers import SeededChooser
from .compare import difference, moved, on_host, rounding_of
from .decide import (
    WAYS,
    draw_decisions,
    pins_that_hold,
    small_is_wide,
    surveyed,
)

STEPS = 5
OUTCOMES = ("planned", "as written", "refused", "wrong", "foreign", "same error")
FAULTS = ("wrong", "foreign")
_LEFT = "what is differentiated runs as written"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What came of one program.

    `kind` is the same for failures that look alike; `compared` steps were compared of
    those that ran; `moved` says what the plan moves, `left` what it leaves as it is
    written, and why. `dropped` are pins that hold for nothing in it, and were left out.
    `seconds` are wall-clock.
    """

    outcome: str
    kind: str = ""
    message: str = ""
    moved: tuple[str, ...] = ()
    compared: int = 0
    seconds: float = 0.0
    planning: float = 0.0
    warned: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Front:
    """The calls that are judged: stowax's own, or others that a test plants.

    `confirm` says whether a difference is looked at again with more plain runs.
    """

    mark: Callable[..., Any] = stowax.stow
    plan: Callable[..., Any] = stowax.plan
    apply: Callable[..., Any] = lambda plan, step: plan.apply(step)
    confirm: bool = True


@dataclasses.dataclass(slots=True)
class _Plain:
    """The step without a plan: its runs, or the error that it ends in."""

    program: Any
    bytes: int = 0
    rounding: float = 0.0
    run: list[Any] | None = None
    error: Exception | None = None
    jitted: Any = None
    variants: list[Any] = dataclasses.field(default_factory=list)


def _steps(built, call, first=None):
    """What each of five steps returned, on the host."""
    args, runs = first or built.args, []
    for number in range(STEPS):
        first, named = built.split(args)
        out = call(*first, **named)
        runs.append(on_host(out))
        args = built.following(args, out, number + 1)
    return runs


def _unmarked(function):
    return function


def plain_run(program):
    """The plain step's five steps."""
    found = _Plain(program)
    built = build(program, _unmarked)
    found.jitted = jax.jit(built.step)
    try:
        first, named = built.split(built.args)
        traced = found.jitted.trace(*first, **named)
        found.rounding = rounding_of(str(traced.jaxpr))
        used = traced.lower().compile().memory_analysis()
        found.bytes = (
            used.argument_size_in_bytes
            + used.output_size_in_bytes
            + used.temp_size_in_bytes
            - used.alias_size_in_bytes
        )
        found.run = _steps(built, found.jitted)
    except Exception as error:
        found.error = error
    return found


def _variant(plain, seed):
    """The plain step from a state that is moved by rounding."""
    built = build(plain.program, _unmarked)
    first = moved(built.args[: built.state], plain.rounding, seed)
    return _steps(built, plain.jitted, (*first, *built.args[built.state :]))


def _other_programs(plain):
    """The plain step compiled otherwise: without fusion, and computed again."""
    options = {"xla_backend_optimization_level": 0}
    for mark, more in ((_unmarked, options), (jax.checkpoint, None)):
        built = build(plain.program, mark)
        try:
            yield _steps(built, jax.jit(built.step, compiler_options=more))
        except Exception:
            continue  # a mark that needs arrays; the others say enough


def options_of(wishes, taken):
    """`stowax.plan`'s options; `taken` are the bytes of the plain step."""
    part = lambda f: None if f is None else max(1, int(f * taken))
    return {
        "target": wishes.target,
        "budget": part(wishes.budget),
        "host_budget": part(wishes.host_budget),
        "pin": dict(wishes.pin) or None,
        "forbid": wishes.forbid,
        "donate": wishes.donate,
        "keep_checkpoint": wishes.keep_checkpoint,
        "roll": wishes.roll,
        "progress": False,
    }


def what_moves(plan):
    """What the plan changes, in words; nothing if the step runs as it is written."""
    found = set()
    for stack in plan.program.stacks if plan.program.rewritten else ():
        stored = stored_by(plan.decisions, stack.name)
        ways = {way.split()[0] for way in stored.values()} or {"recompute"}
        found |= {f"{way} activations" for way in ways} | {"loop"}
    for argument in plan.program.arguments:
        if argument.memory_kind != "device":
            found.add(f"{argument.role} on host")
    return tuple(sorted(found))


def shape_of(message):
    """A message without what differs from program to program."""
    text = message.strip().split("\n")[0]
    text = re.sub(r"\b(?=[0-9a-f]*\d)[0-9a-f]{6,}\b|0x[0-9a-f]+", "#", text)
    text = re.sub(r"\d[\d.,]*", "#", text)
    text = re.sub(r"#\.?#?-[\w#]+", "#", text)
    return re.sub(r"'[^']*'|\"[^\"]*\"|\[[^\]]*\]|\([^)]*\)", "…", text)[:100]


def _frame(error):
    """The last line of stowax that an error passed through."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "/stowax/" in f.filename.replace("\\", "/")]
    if not ours:
        return "no line of stowax"
    last = ours[-1]
    name = last.filename.replace("\\", "/").rpartition("/stowax/")[2]
    return f"{name} in {last.name}"


def failed(stage, error, plain):
    """The verdict on a step that stowax did not run.

    **Arguments:** `stage` is the call that raised `error`, `plain` the plain step's own
    error or `None`.
    """
    name = type(error).__name__
    message = f"{stage}: {name}: {error}"[:2000]
    if plain is not None:
        alike = isinstance(error, stowax.StowaxError | type(plain))
        if alike or isinstance(plain, type(error)):
            kind = f"{type(plain).__name__}: {shape_of(str(plain))}"
            return Verdict(outcome="same error", kind=kind, message=message)
    kind = f"{stage}: {name}: {shape_of(str(error))}"
    if isinstance(error, stowax.StowaxError):
        return Verdict(outcome="refused", kind=kind, message=message)
    where = _frame(error)
    return Verdict(
        outcome="foreign", kind=f"{kind} @ {where}", message=f"{message}\n{where}"
    )


def judge(program, wishes, front=None):
    """What comes of a program under what is wished."""
    return judge_all(program, wishes, front)[0]


def judge_all(program, wishes, front=None, decisions=0):
    """What comes of a program under what is wished, then under drawn decisions.

    The plain step runs once for all of them. Where nothing of the program can be
    planned, nothing is drawn.
    """
    started = time.perf_counter()
    quiet = contextlib.redirect_stdout(io.StringIO())  # programs print, too
    verdicts = []
    with warnings.catch_warnings(record=True) as warned, surroundings(program), quiet:
        warnings.simplefilter("always")
        try:
            plain = plain_run(program)
        except Exception as error:  # JAX cannot even make the state (adafactor's)
            return [failed("build", error, error)]
        told = {str(w.message) for w in warned}
        for verdict in _verdicts(plain, wishes, front or Front(), decisions):
            new = {str(w.message).split("\n")[0] for w in warned} - told
            now = time.perf_counter()
            verdicts.append(
                dataclasses.replace(
                    verdict,
                    seconds=now - started,
                    warned=tuple(sorted(t for t in new if "does not fit" not in t)),
                )
            )
            warned.clear()
            started = now
    return verdicts


def _verdicts(plain, wishes, front, decisions):
    options = options_of(wishes, plain.bytes)
    wanted = options["pin"] or decisions
    survey = _surveyed(plain, wishes, options["budget"]) if wanted else None
    dropped = ()
    if survey is not None and options["pin"]:
        held = pins_that_hold(survey, options["pin"])
        dropped = tuple(f"pin: {a} {b}" for a, b in wishes.pin if a not in held)
        options["pin"] = held or None
    entry = wishes.entry if front == Front() else "plan"
    verdict = _judged(plain, options, front, entry)
    yield dataclasses.replace(verdict, dropped=dropped)
    if plain.error is None and survey is not None:
        read = functools.cache(
            lambda way: _surveyed(plain, wishes, options["budget"], way=way)
        )
        for number in range(decisions):
            way = WAYS[number % len(WAYS)]
            with small_is_wide() if way == "in blocks" else contextlib.nullcontext():
                found = (way != "rolled" and read(way)) or survey
                if not found.bodies:
                    continue
                yield _under_decisions(plain, found, number)


def _surveyed(plain, wishes, budget, *, way="rolled"):
    """What is open for the program; nothing where it runs as it is written."""
    built = build(plain.program, stowax.stow)
    try:
        args = built.split(built.args)
        budget = budget or plain.bytes
        return surveyed(built.step, *args, wishes, budget, way=way)
    except Exception:
        return None  # why is in the plan's notes


def _under_decisions(plain, survey, number):
    """The verdict on one of the program's own draws of decisions."""
    built = build(plain.program, stowax.stow)  # the last one's arrays were donated
    built = dataclasses.replace(built, keywords=())
    chooser = SeededChooser(100 * plain.program.data + number)
    try:
        drawn = draw_decisions(survey, chooser)
        got = _steps(built, drawn.step, drawn.place(built.args))
    except Exception as error:
        return failed(f"decisions {number}", error, None)
    return _verdict(plain, got, drawn.moved, True)


def _by_jit(built, options, part, stages):
    """`(plan, step, arguments)` by `stowax.jit`; `part` is what the step donates."""
    stages.append("jit")
    first, named = built.split(built.args)
    if options.pop("donate"):
        options["donate_argnums"] = tuple(range(built.state))
    if part:
        options["donate_argnums"] = part
    try:
        step = stowax.jit(built.step, **options)
        step.trace(*first, **named)
    except MisfitError:  # so small a budget is for nobody; without one it has to run
        step = stowax.jit(built.step, **{**options, "budget": None, "pin": None})
        step.trace(*first, **named)
    return step.plan, step, built.args


def _by_plan(built, options, part, front, stages):
    """`(plan, step, arguments)` by `stowax.plan`, `apply` and `place`."""
    if part:
        options = {**options, "donate": None}
        built = dataclasses.replace(
            built, step=jax.jit(built.step, donate_argnums=part)
        )
    stages.append("plan")
    first, named = built.split(built.args)
    plan = front.plan(built.step, *first, **named, **options)
    stages.append("apply")
    step = front.apply(plan, built.step)
    stages.append("place")
    placed = plan.place(*built.args[: built.state])
    placed = (placed,) if built.state == 1 else placed
    return plan, step, (*placed, *built.args[built.state :])


def _judged(plain, options, front, entry="plan"):
    program = plain.program
    built, stages = build(program, front.mark), []
    part = (1,) if program.given_away == "a part" else ()
    started = time.perf_counter()
    try:
        if entry == "jit":
            plan, planned, args = _by_jit(built, options, part, stages)
        else:
            plan, planned, args = _by_plan(built, options, part, front, stages)
        planning = time.perf_counter() - started
        stages.append("call")
        got = _steps(built, planned, args)
    except Exception as error:
        return failed(stages[-1], error, plain.error)
    if plain.error is not None:
        name = type(plain.error).__name__
        return Verdict(
            outcome="foreign",
            kind=f"no error where the plain step ends in {name}",
            message=str(plain.error)[:2000],
        )
    verdict = _verdict(plain, got, what_moves(plan), front.confirm)
    left = tuple(n for n in plan.proof.notes if n.startswith(_LEFT))
    return dataclasses.replace(verdict, planning=planning, left=left)


def _verdict(plain, got, changes, confirm):
    found, compared = _compared(plain, got, confirm)
    return Verdict(
        outcome="wrong" if found else "planned" if changes else "as written",
        kind=f"wrong numbers with {', '.join(changes) or 'nothing moved'}"
        if found
        else "",
        message=str(found) if found else "",
        moved=changes,
        compared=compared,
    )


def _compared(plain, got, confirm):
    """The difference that no rounding explains, looked for with more and more runs."""
    if not plain.variants:
        plain.variants = [_variant(plain, 0), _variant(plain, 1)]
    found, steps = difference(plain.run, got, plain.variants)
    if not found or not confirm:
        return found, steps
    if len(plain.variants) == 2:
        plain.variants += [_variant(plain, seed) for seed in range(2, 8)]
        plain.variants += _other_programs(plain)
    return difference(plain.run, got, plain.variants)
