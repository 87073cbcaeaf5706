"""Refuses problems that no budget could solve, in words that name the value.

Pins reach the planner as narrowed `Value.allowed`. Called before every solve. What goes
silently wrong without it: the solver says "infeasible", and the user buys memory that
cannot help.
"""

from .._errors import ArgumentError
from .._records._stages import Body, Problem, Value
from ._tables import cannot_run_again, maker, may_recompute, storing_decisions


def check_problem(problem: Problem) -> None:
    """Raises `ArgumentError` if some needed value can be had in no allowed way.

    Also refuses a `prefetch_depth` below 1 and a link that moves nothing.
    """
    if problem.prefetch_depth < 1:
        raise ArgumentError(
            "prefetch_depth",
            f"{problem.prefetch_depth}",
            "Write 1 (copies are not pipelined) or 2 (one run of the body ahead).",
        )
    for rate in (problem.link.device_to_host, problem.link.host_to_device):
        if not rate > 0:
            raise ArgumentError(
                "link", f"{rate} bytes per second", "Write a rate above zero."
            )
    for body in problem.bodies:
        _check_body(body)


def obtainable(body: Body) -> list[bool]:
    """For each value, whether it can be at hand in the backward pass at all.

    Available, storable, or recomputed from values that are obtainable; one pass is
    enough because operations stand in an order in which they can run.
    """
    had = [
        value.available or bool(storing_decisions(body, value)) for value in body.values
    ]
    for operation in body.operations:
        if all(had[i] for i in operation.inputs):
            for i in operation.outputs:
                had[i] = had[i] or may_recompute(body, body.values[i])
    return had


def _check_body(body: Body) -> None:
    had = obtainable(body)
    for value in body.values:
        if value.needed and not had[value.index]:
            culprit = _culprit(body, value, had)
            through = (
                ""
                if culprit.index == value.index
                else f", which is needed to recompute {value.name!r} ({value.source})"
            )
            raise ArgumentError(
                "pin",
                f"{_open(culprit)} for {culprit.name!r} ({culprit.source}) of "
                f"{body.name!r}{through}",
                _remedy(body, culprit),
            )


def _culprit(body: Body, value: Value, had: list[bool]) -> Value:
    """The value at the start of the chain that makes `value` unobtainable."""
    while may_recompute(body, value):
        inputs = maker(body, value).inputs
        value = body.values[next(i for i in inputs if not had[i])]
    return value


def _open(value: Value) -> str:
    return " or ".join(repr(d) for d in sorted(value.allowed)) or "no open decision"


def _remedy(body: Body, value: Value) -> str:
    reason = cannot_run_again(body, value)
    if reason is not None:
        because = f"It cannot be recomputed: it is {reason}. "
    else:
        because = ""
    if not body.in_loop and "offload" in value.allowed:
        because += f"{body.name!r} is not a loop, so nothing of it can be offloaded. "
    if reason is None:
        return because + "Allow 'recompute' or 'keep' for it."
    either = "'keep' or 'offload'" if body.in_loop else "'keep'"
    return because + f"Allow {either} for it."
