"""Putting decisions into effect: the step as `jax.jit` would return it, plan included.

Takes plain data (what each stack stores), so that the closed loop can try decisions that
are no `Plan` yet. The step's own code is not touched: while it is traced, marked functions
go through a `Rewriter`.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from ._errors import PlanMismatchError
from ._linearize import LinearizedBody
from ._mark import handling
from ._pipeline import Stack, Stored
from ._rewrite import Options, Rewriter
from ._trace import check_step


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StackPlan:
    """What one stack stores: value number → "keep" or "offload".

    `fingerprint` is the digest of the body that the numbers belong to.
    """

    fingerprint: str
    stored: Stored


def apply_decisions(
    step: Callable[..., Any],
    stacks: Mapping[str, StackPlan] | None,
    options: Options,
    *,
    donate: tuple[int, ...] = (),
    compiler_options: Mapping[str, Any] | None = None,
    label: bool = False,
) -> Any:
    """`jax.jit(step)` under the given decisions; `None` for none at all.

    **Raises:** while tracing, `PlanMismatchError` if the step is not the one that the
    decisions were made for.
    """
    check_step(step)
    jit = functools.partial(
        jax.jit,
        donate_argnums=donate,
        compiler_options=dict(compiler_options) if compiler_options else None,
    )
    if stacks is None:
        return jit(step)

    def choose(stack: Stack, body: LinearizedBody) -> Stored:
        plan = stacks.get(stack.name)
        fingerprint = body.forward.fingerprint
        if plan is None or plan.fingerprint != fingerprint:
            known = ", ".join(
                f"{name} ({p.fingerprint})" for name, p in stacks.items()
            )
            raise PlanMismatchError(
                f"step: its repeated body {stack.name} ({fingerprint}, {stack.count} "
                f"times, at {stack.source}) is not in the plan, which has {known}. The "
                "plan was made for another step, other argument shapes or dtypes, or "
                "another version of JAX: call stowax.plan again."
            )
        return plan.stored

    rewriter = Rewriter(choose, options, label=label)

    @functools.wraps(step)
    def planned(*args: Any, **kwargs: Any) -> Any:
        with handling(rewriter):
            return step(*args, **kwargs)

    return jit(planned)


def attach_options(jitted: Any, compiler_options: Mapping[str, Any]) -> Any:
    """`jitted`, with options that only `Target.compile` reads.

    A plan for a machine that is not there is compiled for it by `Target.compile`, and may
    be called on the attached one to check its numbers: that compiler would refuse options
    of the other.
    """
    jitted.stowax_compiler_options = dict(compiler_options)
    return jitted
