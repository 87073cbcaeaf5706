"""The plans that people write by hand, as decisions, to compare the solver's with.

Called by the report, the solver, the survey and the search. A policy in the sense of
`jax.checkpoint` marks values wherever they occur; what nobody reads any more is not
stored, as in JAX, where unread residuals are dead code. What goes silently wrong
without that: a policy is charged for values that its own other values make useless, and
the comparison flatters the solver.
"""

from collections.abc import Callable

from .._records._stages import Body, Decision, Decisions, Problem, Value
from ._evaluate import STORED, recomputed_values
from ._tables import cannot_run_again

Predicate = Callable[[Body, Value], bool]


def _nothing(_body: Body, _value: Value) -> bool:
    return False


def _read(_body: Body, value: Value) -> bool:
    """Whether the backward pass reads it, or computes it where it is read."""
    return value.needed or (value.virtual and "keep" in value.allowed)


def _cannot_be_recomputed(body: Body, value: Value) -> bool:
    return cannot_run_again(body, value) is not None


def named(
    problem: Problem, keep: Predicate = _nothing, offload: Predicate = _nothing
) -> Decisions:
    """The decisions of a policy given by two predicates over (body, value).

    Everything else that the backward pass needs is recomputed, except what cannot be:
    that is kept. `offload` wins over `keep`, and becomes `keep` where the value or its
    body cannot be offloaded.

    **Arguments:** `keep` and `offload` answer whether the policy stores this value so.

    **Returns:** decisions in which only what is read is stored.

    Example: JAX's `dots_saveable`, for any `problem`:

    >>> def made_by_dot(body, value):
    ...     operation = value.operation
    ...     return (operation is not None
    ...             and body.operations[operation].primitive == "dot_general")
    >>> from stowax._planner import named
    >>> policy = lambda problem: named(problem, keep=made_by_dot)
    """
    return tuple(_one_body(body, keep, offload) for body in problem.bodies)


def baselines(problem: Problem) -> dict[str, Decisions]:
    """The hand-written plans every problem has, by name.

    **Returns:** `"keep all"` (every needed value on the device), `"recompute all"`
    (only what cannot be recomputed is kept), `"offload layer inputs"` (the bodies'
    inputs that cannot be recomputed wait in host memory where they may, and what has
    the name of one: that of a body's second layer; the rest is recomputed); where
    there is state to decide on, `"offload state"` (the state in host
    memory, every needed value on the device).
    """

    def is_input(body: Body, value: Value) -> bool:
        if body.phase != "layers":
            return False
        return value.operation is None or _named_like_an_input(body, value)

    def is_state(body: Body, _value: Value) -> bool:
        return body.phase == "update"

    found = {
        "keep all": named(problem, keep=_read),
        "recompute all": named(problem),
        "offload layer inputs": named(problem, offload=is_input),
    }
    if any(body.phase == "update" for body in problem.bodies):
        found["offload state"] = named(
            problem, keep=lambda body, value: value.needed, offload=is_state
        )
    return found


def _named_like_an_input(body: Body, value: Value) -> bool:
    """Whether the user gave a value the name of an input, and it is another array."""
    assert value.operation is not None
    operation = body.operations[value.operation]
    made = all(body.values[i].operation is not None for i in operation.inputs)
    inputs = (v for v in body.values if v.operation is None and not v.available)
    named_so = any(v.name == value.name for v in inputs)
    return operation.primitive == "name" and made and named_so


def _one_body(
    body: Body, keep: Predicate, offload: Predicate
) -> tuple[Decision | None, ...]:
    chosen: list[Decision | None] = [None] * len(body.values)
    for value in body.values:
        if value.available:
            continue
        if body.in_loop and "offload" in value.allowed and offload(body, value):
            chosen[value.index] = "offload"
        elif (
            offload(body, value)
            or keep(body, value)
            or _cannot_be_recomputed(body, value)
        ):
            chosen[value.index] = "keep"
    return tidy(body, tuple(chosen))


def tidy(
    body: Body, chosen: tuple[Decision | None, ...]
) -> tuple[Decision | None, ...]:
    """`chosen` without what is stored for nothing, recomputed values marked."""
    recomputed, read = recomputed_values(body, chosen)
    return tuple(
        "recompute"
        if i in recomputed
        else decision
        if decision in STORED and (i in read or body.values[i].virtual)
        else None
        for i, decision in enumerate(chosen)
    )
