"""`plan`, the front door: a step and a budget in, a `Plan` with a certificate out.

The order of things: trace the step (`_trace`), survey it on the target (`_survey`), run
the closed loop (`_loop`), write down what came out (`_describe`).
"""

import dataclasses
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax

from .._errors import ArgumentError, StowaxError
from .._layers._rewrite import Options
from .._planner import solve
from .._records._plan import ArgumentRecord, Baseline, PinPrice
from .._records._stages import least_bytes
from .._search._as_written import (
    AsWritten,
    Returned,
    asks_for_more,
    narrowed,
    without_donation,
)
from .._search._attempt import Attempt
from .._search._certificate import certify
from .._search._describe import (
    baseline_records,
    decision_records,
    host_notes,
    in_the_way,
    notes,
    stack_records,
)
from .._search._forms import Found, find_plan
from .._search._improve import improve
from .._search._loop import MOST_COMPILES, Search
from .._search._parts import InParts, in_parts
from .._search._sensitivity import link_notes
from .._search._trial import check_offloads
from .._state._shards import device_bytes, partition_of, shard_shape
from .._state._state import NAME as STATE
from .._step._trace import trace_step
from .._survey._options import wants_row_major
from .._survey._preferences import Preferences
from .._survey._survey import Survey, take_survey
from .._target._compiled import put_in_device_memory
from .._target._machine import Target
from .._target._target import target as find_target
from .._versions import versions
from . import _asked
from ._plan import Plan


def plan(
    step: Callable[..., Any],
    *args: Any,
    budget: int | str | None = None,
    host_budget: int | str | None = None,
    target: str | Target | None = None,
    pin: Mapping[str, str] | None = None,
    forbid: Collection[str] = (),
    keep_checkpoint: bool = False,
    roll: bool = True,
    donate: bool | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    compiles: int = MOST_COMPILES,
    progress: _asked.Progress = None,
) -> Plan:
    """Decides what `step` keeps, offloads and computes again, and proves that it fits.

    **Arguments:**

    - `step`: the training step, not jitted; somewhere in it a function marked with
      `stowax.stow` is differentiated.
    - `args`: what it is called with: pytrees of arrays or `jax.ShapeDtypeStruct`s.
      Without shardings they are planned for one device of the target. In which memory
      they lie now does not matter: the plan says where they are to be (`Plan.place`).
    - `budget`: device memory per device, bytes or text (`"16GiB"`); `None`: what the
      target has. `host_budget`: host memory per device, likewise.
    - `target`: a name (`"v5p-8"`) or a `Target`; `None`: the attached device.
    - `pin`: pattern → decision, on names, roles and source lines of values
      (`{"*attention*": "keep"}`). `forbid`: decisions that may not be used
      (`"offload"`, or `"recompute:*attention*"` for some values).
    - `keep_checkpoint`: leave the user's own `jax.checkpoint` calls inside repeated
      layers as they are; by default the plan decides anew.
    - `roll`: look for the repeating blocks of unrolled loops.
    - `donate`: whether the state's buffers are donated; `None`: where the memory is
      needed.
    - `compiler_options`: XLA's, added to the plan's own.
    - `compiles`: how many programs may be compiled, at least 4. Those beyond try
      changes of the plan, also of one that could do without, and keep what makes the
      compiled step faster.
    - `progress`: called with lines of text; `None`: standard error, if planning takes
      over two seconds; `False`: nothing.

    **Returns:** a `Plan`; `fits` says whether its compiled program stays within the
    budget.

    **Raises:** `ArgumentError` and `StepError` for what cannot be planned, naming the
    argument; `CompileError` with the compiler's words; `OffloadVanishedError` if a
    planned copy is not in the compiled program.

    ```python
    plan = stowax.plan(train_step, state, batch, budget="16GiB", target="v5p-8")
    print(plan)
    ```
    """
    started = time.perf_counter()
    _asked.check_kinds(pin, forbid, donate, compiler_options, progress)
    _asked.check_compiles(compiles, MOST_COMPILES)
    say = _asked.sayer(progress, started)
    machine = target if isinstance(target, Target) else find_target(target)
    device_limit = _asked.device_budget(budget, machine)
    host_limit = _asked.host_budget(host_budget, machine)
    specs = _specs(machine, args)
    whole = sum(device_bytes(spec) for spec in jax.tree.leaves(specs))
    least = least_bytes(device_limit, whole)
    preferences = Preferences(pin=pin or {}, forbid=forbid, least_bytes=least)
    options = Options(
        keep_checkpoint=keep_checkpoint,
        roll=roll,
        row_major=wants_row_major(machine, specs),
    )
    say(f"tracing {getattr(step, '__name__', 'the step')}")
    traced = trace_step(step, specs, options)
    found = len(traced.stacks)
    bodies = "1 repeated body" if found == 1 else f"{found} repeated bodies"
    say(f"surveying {bodies} on {machine.name}")
    free = take_survey(step, specs, traced, machine, options, least)
    if donate is False:
        free = without_donation(free)
    survey = narrowed(free, preferences)
    for staying in free.staying:
        preferences.allow(staying.value)
    preferences.check_matched()
    search = Search(
        survey=survey,
        free=free,
        budget=device_limit,
        host_budget=host_limit,
        user_options=dict(compiler_options or {}),
        donate=donate,
        as_written=not asks_for_more(free, survey, lambda value: True),
        say=say,
    )
    wishes = {"pin": pin or {}, "forbid": forbid}
    forms = AsWritten(rolled=search, **wishes), Returned(rolled=search, **wishes)
    found = in_parts(_run(search, *forms), InParts(**wishes), compiles)
    found = improve(found, compiles)
    best, survey = found.best, found.search.survey
    check_offloads(best.measured)
    prices = _pin_prices(found.search.free, preferences, found.search)
    return Plan(
        **_identity(survey, best),
        **_figures(found),
        budget_bytes=device_limit,
        host_budget_bytes=host_limit,
        pins=prices,
        forbid=preferences.forbidden(),
        decisions=_decisions(survey, best, preferences),
        planning_seconds=time.perf_counter() - started,
    )


def _run(search: Search, written: AsWritten, returned: Returned) -> Found:
    """What the search found; without offloads where JAX refuses them.

    Under `jax.vmap` of a gradient, or in a derivative of one, JAX has operations that
    take values of one memory space only.
    """
    try:
        search.try_host_memory()
        return find_plan(search, written, returned)
    except ValueError as error:
        if isinstance(error, StowaxError) or "memory_space" not in str(error):
            raise
    search.say("JAX refuses host memory inside this step: planning without offloads")
    staying = narrowed(search.survey, Preferences(pin={}, forbid=("offload",)))
    staying = dataclasses.replace(staying, without_offloads=True)
    search = dataclasses.replace(search, survey=staying)
    return find_plan(search, written, lambda: None)


def _specs(machine: Target, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """`args` on the target; an error names the argument as `plan` knows it.

    All of them on the device: a plan may be asked for with what another one placed.
    """
    try:
        return put_in_device_memory(machine.specs(*args))
    except ArgumentError as error:
        name = error.argument.replace("specs[", "args[", 1)
        raise ArgumentError(name, error.got, error.instead) from None


def _identity(survey: Survey, best: Attempt) -> dict[str, Any]:
    traced, machine, options = survey.step, survey.target, survey.options
    plan = survey.step_plan(best.decisions) if best.decisions else None
    hosted = plan.hosted.shards if plan and plan.hosted else {}
    orders = plan.hosted.orders if plan and plan.hosted else {}
    on_host = plan.hosted.on_host if plan and plan.hosted else ()
    specs = jax.tree.leaves(survey.specs)
    return {
        "step": traced.name,
        "target": machine.name,
        "device_kind": (machine.compile_devices or machine.devices)[0].device_kind,
        "compile_only": machine.compile_only,
        "keep_checkpoint": options.keep_checkpoint,
        "roll": options.roll,
        "row_major": options.row_major,
        "parts": dict(options.parts),
        "late": not survey.tight,
        "gradients_on_host": survey.gradients_on_host,
        "least_bytes": survey.least_bytes,
        "lean": bool(plan and plan.hosted and plan.hosted.lean),
        "arguments": tuple(
            ArgumentRecord(
                path=a.path,
                shape=tuple(a.spec.shape),
                shard=shard_shape(specs[i]),
                partition=partition_of(specs[i]),
                dtype=str(a.spec.dtype),
                role=a.role,
                output=traced.updates.get(i),
                memory_kind="pinned_host" if i in hosted else "device",
                on_host=i in on_host,
                order=orders.get(i),
            )
            for i, a in enumerate(traced.arguments)
        ),
        "versions": versions(),
    }


def _figures(found: Found) -> dict[str, Any]:
    """The fields that come out of the loop."""
    search, best, survey = found.search, found.best, found.search.survey
    measured, evaluation = best.measured, best.evaluation
    fits = best.fits(search.budget, search.host_budget)
    timeline = measured.inspection.timeline if measured.inspection else None
    certificate = certify(search, best)
    smallest, source = found.smallest_budget()
    return {
        "fits": fits,
        "outcome": certificate.outcome,
        "device_bytes": measured.compiled_bytes,
        "host_bytes": measured.host_bytes,
        "predicted_device_bytes": search.forecast.expected(best.decisions)
        if best.decisions
        else measured.predicted_bytes,
        "first_predicted_device_bytes": search.log[0].measured.predicted_bytes,
        "step_seconds": measured.step_seconds,
        "exposed_seconds": timeline.exposed_seconds if timeline else 0.0,
        "model_seconds": certificate.model_seconds,
        "bound_seconds": certificate.bound_seconds,
        "gap": certificate.gap,
        "binding": certificate.binding,
        "seconds_per_gib": certificate.seconds_per_byte * 2**30,
        "smallest_budget": smallest,
        "smallest_budget_is": source,
        "stacks": stack_records(survey, best.decisions, evaluation),
        "baselines": _baselines(found),
        "trials": tuple(a.measured.trial for a in search.log),
        "donate_argnums": survey.step.donate if best.donated else (),
        "compiler_options": dict(best.options),
        "unpriced": survey.unpriced,
        "notes": (
            *host_notes(survey, best.decisions, measured.inspection),
            *notes(
                survey,
                fits,
                measured.host_bytes,
                best.decisions,
                unrolled=found.as_written,
                by_compiler=search.left_to_the_compiler(best),
            ),
            *(link_notes(search, best.decisions) if fits else ()),
        ),
        "solving_seconds": search.solving_seconds,
        "in_the_way": () if fits else in_the_way(survey),
    }


def _baselines(found: Found) -> tuple[Baseline, ...]:
    """The policies under the model; what they say of layers holds for rolled ones."""

    def records(search: Search) -> dict[str, Baseline]:
        limits = search.host_budget, search.budget
        made = baseline_records(search.forecast, search.problem(), *limits)
        return {record.name: record for record in made}

    rolled, chosen = records(found.rolled), {}
    if found.as_written:
        own = records(found.search)
        chosen = {name: own[name] for name in ("keep all", "offload state")}
    return tuple({**rolled, **chosen}.values())


def _decisions(survey: Survey, best: Attempt, preferences: Preferences) -> Any:
    if best.decisions is None or best.evaluation is None:
        return ()
    values = [(body.name, value) for body in survey.bodies for value in body.values]
    values += [(STATE, staying.value) for staying in survey.staying]
    pinned = {
        (body, value.index): pattern
        for body, value in values
        if (pattern := preferences.matched(value)) is not None
    }
    return decision_records(survey, best.decisions, pinned)


def _pin_prices(
    free: Survey, preferences: Preferences, search: Search
) -> tuple[PinPrice, ...]:
    """What each pin costs under the planner's model: with it, less without it."""
    if not preferences.patterns() or not free.bodies:
        return ()
    whole = solve(search.problem()).evaluation.seconds
    prices = []
    for pattern, decision in preferences.patterns():
        without = preferences.without(pattern, decision)
        problem = search.problem(survey=narrowed(free, without))
        matched = preferences.count(pattern, decision)
        prices.append(
            PinPrice(
                pattern=pattern,
                decision=decision,
                matched=matched,
                seconds=max(0.0, whole - solve(problem).evaluation.seconds),
            )
        )
    return tuple(prices)
