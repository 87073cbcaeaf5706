"""`plan` and `plans`, the front doors: a step and a budget in, a `Plan` out.

`_asking` checks what was asked, `_finding` does the work, `_record` writes it down.
"""

import inspect
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from .._calling._calling import explaining, flattened
from .._calling._known import NO_PROGRAM, Known, known
from .._calling._objects import together
from .._errors import ArgumentError, CallError
from .._survey._asked import Asked
from .._target._machine import Target
from . import _asked
from ._asking import asked_for
from ._finding import find
from ._plan import Plan
from ._record import written_down


def plan(
    step: Callable[..., Any],
    *args: Any,
    budget: int | str | None = None,
    host_budget: int | str | None = None,
    host_reserve: int | str | None = None,
    target: str | Target | None = None,
    pin: Mapping[str, str] | None = None,
    forbid: Collection[str] = (),
    keep_checkpoint: bool = False,
    roll: bool = True,
    donate: bool | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    compiles: int | None = None,
    cache: str | os.PathLike[str] | None = None,
    progress: _asked.Progress = None,
    **kwargs: Any,
) -> Plan:
    """Decides what `step` keeps, offloads and computes again, and proves that it fits.

    **Arguments:**

    - `step`: the training step, as it is, jitted or not. What it differentiates is
      planned, or what of that is marked with `stowax.stow`.
    - `args`: what it is called with: arrays or `jax.ShapeDtypeStruct`s in pytrees, in
      Flax NNX objects that the step changes in place, in Equinox modules.
      Without shardings they are planned for one device of the target. In which memory
      they lie now does not matter: the plan says where they are to be (`Plan.place`).
    - `budget`: device memory per device, bytes or text (`"16GiB"`), or a share of what
      the step takes as it is written (`"60%"`); `None`: what the target has.
      `host_budget`: bytes of host memory per device, or text, of which `host_reserve`
      is for others, such as checkpoints while they are saved.
    - `target`: a name (`"v5p-8"`) or a `Target`; `None`: the devices that `args` are
      sharded over, else the attached ones.
    - `pin`: pattern → decision, on names, roles and source lines of values
      (`{"*attention*": "keep"}`). `forbid`: decisions that may not be used
      (`"offload"`, `"recompute:*attention*"` for some values, `"host update"`,
      `"tile"`).
    - `keep_checkpoint`: leave the user's own `jax.checkpoint` calls inside repeated
      layers as they are; by default the plan decides anew.
    - `roll`: look for the repeating blocks of unrolled loops.
    - `donate`: whether the state's buffers are donated; `None`: as a step that is
      jitted says, else where the memory is needed.
    - `compiler_options`: XLA's, added to the plan's own.
    - `compiles`: how many programs may be compiled, at least 4. Those beyond try
      changes of the plan, also of one that could do without, and keep what makes the
      compiled step faster. `None`: until one fits, 4 at most, and one more; on a v5e,
      v5p or v6e then the best with more of the chip's fast memory for each kernel.
    - `cache`: a folder for compiled programs, by content; what is planned again, on
      another day or for another budget, compiles nothing twice. `None`: none are kept.
    - `progress`: called with lines of text; `None`: standard error, if planning takes
      over two seconds; `False`: nothing.
    - `kwargs`: arguments of the step that it is called with by their names.

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
    given = dict(locals())
    given["budgets"] = (given.pop("budget"),)
    try:
        (made,) = _made(plan, given)
    except ArgumentError as error:
        if error.argument != "budgets":
            raise
        raise ArgumentError("budget", error.got, error.instead) from None
    return made


def plans(
    step: Callable[..., Any],
    *args: Any,
    budgets: Iterable[int | str | None],
    host_budget: int | str | None = None,
    host_reserve: int | str | None = None,
    target: str | Target | None = None,
    pin: Mapping[str, str] | None = None,
    forbid: Collection[str] = (),
    keep_checkpoint: bool = False,
    roll: bool = True,
    donate: bool | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    compiles: int | None = None,
    cache: str | os.PathLike[str] | None = None,
    progress: _asked.Progress = None,
    **kwargs: Any,
) -> tuple[Plan, ...]:
    """One plan per budget: what more memory buys, and where it stops to buy anything.

    Each is what `plan` finds for its budget, unless a program that was compiled for
    another one fits and is faster: more memory never makes a plan slower. The step is
    traced and surveyed once.

    **Arguments:** `budgets` are what `plan` takes as its `budget`, in any order; all
    else is as for `plan`, `compiles` for each budget.

    **Returns:** the plans in the order of `budgets`. `search.planning_seconds` are
    those that its budget took; the first one's have the tracing.

    **Raises:** what `plan` does; `ArgumentError` if there is no budget.

    ```python
    for plan in stowax.plans(train_step, state, batch, budgets=("12GiB", "16GiB")):
        print(plan.budget_bytes, plan.step_seconds)
    ```
    """
    return _made(plans, dict(locals()))


def _made(door: Callable[..., Any], given: dict[str, Any]) -> tuple[Plan, ...]:
    """What `plans` returns, for what `door`, one of the two above, was given."""
    step, args, kwargs = (given.pop(name) for name in ("step", "args", "kwargs"))
    try:
        return plans_for(known(step), args, kwargs, **given)
    except CallError as error:
        options = inspect.signature(door).parameters.values()
        names = [o.name for o in options if o.kind == o.KEYWORD_ONLY]
        raise error.near(names) from None


def plans_for(
    step: Known, args: Sequence[Any], kwargs: Mapping[str, Any], **wishes: Any
) -> tuple[Plan, ...]:
    """`plans` for a step of which it is known how it is called."""
    if step.pmapped:
        raise ArgumentError("step", f"{step.function!r:.60}", NO_PROGRAM)
    with together():
        taken, own, flat = flattened(step, args, kwargs)
        with explaining(taken):
            asked = asked_for(flat, taken.arrays, taken.donated, **wishes)
            return found_for(asked, taken_apart=own is None)


def found_for(asked: Asked, *, taken_apart: bool) -> tuple[Plan, ...]:
    """The plans, in the order of the budgets that were asked for.

    **Arguments:** `taken_apart` says that the step takes not what the user's does.
    """
    made: dict[int, Plan] = {}  # the same budget twice is one plan
    found = find(asked)
    for one in found:
        if id(one) not in made:
            made[id(one)] = written_down(one, taken_apart=taken_apart)
    return tuple(made[id(one)] for one in found)
