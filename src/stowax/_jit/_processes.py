"""One plan for all processes of a job.

Two processes that plan the same step may come to different plans: searches are cut off
by time, rates are measured. Their programs would then wait for one another for ever. So
the first process plans, and the others take its plan. Before, each says what it is
about to run; where that differs, every process gets an error, and none waits.
"""

import itertools
import json
from collections.abc import Callable
from typing import Any, TypeVar

from .._errors import NothingToPlanError, PlanMismatchError, StowaxError
from .._jax_processes import post, processes, wait_for
from .._plan._plan import Plan, plan_of

_T = TypeVar("_T")

PATIENCE_SECONDS = 300.0
"""How long a process waits for the others to come to the same step."""

_turns = itertools.count()


def agreed(
    name: str, ask: Callable[[], tuple[str, _T]], make: Callable[[_T], Plan]
) -> tuple[_T, Plan]:
    """What is asked here, and the plan that the first process makes of it.

    **Arguments:** `ask` returns what is planned and a text that stands for it, which
    has to be the same in all processes; `make` plans it. `name` is for messages.

    **Raises:** `PlanMismatchError` in all processes if they differ, or if one of them
    fails or does not come to the step; what `ask` and `make` raise.
    """
    me, count = processes()
    if count == 1:
        asked = ask()[1]
        return asked, make(asked)
    turn = f"stowax/{next(_turns)}"
    try:
        step, asked = ask()
    except Exception as error:
        _post(f"{turn}/asked/{me}", name=name, error=_text(error))
        if not me:
            _post(f"{turn}/answer", error=_text(error))
        raise
    _post(f"{turn}/asked/{me}", name=name, step=step)
    if me:
        return asked, _told(turn, name)
    try:
        _check_same(turn, step, name, count)
        plan = make(asked)
    except Exception as error:
        kind = "nothing" if isinstance(error, NothingToPlanError) else "error"
        _post(f"{turn}/answer", **{kind: _text(error)})
        raise
    _post(f"{turn}/answer", plan=plan.to_json())
    return asked, plan


def _post(at: str, **said: Any) -> None:
    post(at, json.dumps(said))


def _text(error: Exception) -> str:
    own = isinstance(error, StowaxError)
    return str(error) if own else f"step: {type(error).__name__}: {error}"


def _check_same(turn: str, step: str, name: str, count: int) -> None:
    for other in range(1, count):
        said = wait_for(f"{turn}/asked/{other}", PATIENCE_SECONDS)
        if said is None:
            raise PlanMismatchError(_missing(other, name))
        asked = json.loads(said)
        if "error" in asked:
            raise PlanMismatchError(f"{asked['error']} (so says process {other})")
        if asked["step"] != step:
            what = "another plan or step" if asked["name"] == name else asked["name"]
            raise PlanMismatchError(
                f"step: process 0 is about to run {name}, and process {other} {what}. "
                "Call the same steps in the same order, with arguments of the same "
                "types and the same plan, in every process."
            )


def _told(turn: str, name: str) -> Plan:
    """The first process's plan, which may take it as long as it takes."""
    if wait_for(f"{turn}/asked/0", PATIENCE_SECONDS) is None:
        raise PlanMismatchError(_missing(0, name))
    while (said := wait_for(f"{turn}/answer", PATIENCE_SECONDS)) is None:
        continue  # it is planning; where it ends, JAX's own service ends all of them
    answer: dict[str, Any] = json.loads(said)
    if "nothing" in answer:
        raise NothingToPlanError(answer["nothing"])
    if "plan" not in answer:
        raise PlanMismatchError(f"{answer['error']} (so says process 0)")
    return plan_of(answer["plan"])


def _missing(other: int, name: str) -> str:
    return (
        f"step: process {other} did not come to {name} within "
        f"{PATIENCE_SECONDS:.0f} s. Call a planned step in every process."
    )
