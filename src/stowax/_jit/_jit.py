"""`stowax.jit`, the one line: a step that is planned when it is first called."""

import functools
import inspect
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import jax

from .._calling._known import known
from .._errors import ArgumentError, CallError, did_you_mean
from .._plan import _asked
from .._plan._plan import Plan
from .._target._machine import Target
from ._planned import Planned
from ._wishes import WISHES, given_plan, wished


def jit(
    fun: Callable[..., Any] | None = None,
    /,
    *,
    budget: int | str | None = None,
    host_budget: int | str | None = None,
    host_reserve: int | str | None = None,
    target: str | Target | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    pin: Mapping[str, str] | None = None,
    forbid: Collection[str] = (),
    keep_checkpoint: bool = False,
    roll: bool = True,
    compiler_options: Mapping[str, Any] | None = None,
    compiles: int | None = None,
    cache: str | os.PathLike[str] | Literal[False] | None = None,
    progress: _asked.Progress = None,
    **jax_options: Any,
) -> Any:
    """What `jax.jit` is, with a budget: a step that trains within so much memory.

    The first call plans the step, compiles it, moves what belongs in host memory there,
    and runs it; every later call costs what one of `jax.jit`'s function costs. Calls
    with arrays of other types are planned on their own. What cannot be planned runs as
    it is written, and the plan's notes say why.

    **Arguments:**

    - `fun`: the training step, as it is: a function of arrays, of Flax NNX objects that
      it changes in place, of Equinox modules; or one that `jax.jit`, `nnx.jit` or
      `eqx.filter_jit` made already. What it differentiates is found by itself
      (`stowax.stow` restricts it). Without `fun`, a decorator with these options.
    - `budget`, `host_budget`, `host_reserve`, `target`, `pin`, `forbid`,
      `keep_checkpoint`, `roll`, `compiler_options`, `compiles`, `progress`: as for
      `stowax.plan`.
    - `cache`: a folder where plans are kept, and programs that were compiled to find
      them; a step that was planned before is not planned again. `None`: plans are kept
      in the user's cache (`~/.cache/stowax/plans`), programs are not; `False`: nothing
      is kept.
    - `plan`: a plan that was made before, or its file; nothing is planned then.
    - `static_argnums`, `static_argnames`, `donate_argnums`, `donate_argnames`: as for
      `jax.jit`. Where nothing is said to be donated, the state is donated if that saves
      memory that is needed, as `stowax.plan` does.
    - `jax_options`: `jax.jit`'s others (`in_shardings`, `out_shardings`, `inline`, …).

    **Returns:** a `Planned`: called like the step, with `.plan`, `.lower`, `.trace`.

    **Raises:** `ArgumentError` for `fun` that cannot be called; what `jax.jit` raises
    for positions and names that are none; what `stowax.plan` and the step raise, when
    it is called; `MisfitError`, before anything runs, where no
    plan keeps the budget.

    ```python
    step = stowax.jit(train_step, budget="16GiB", donate_argnums=0)
    state, loss = step(state, batch)
    print(step.plan)
    ```
    """
    options = dict(locals())
    _check_names(jax_options)
    if options.pop("fun") is None:
        return functools.partial(jit, **options.pop("jax_options"), **options)
    if not callable(fun):
        raise ArgumentError(
            "fun", f"{fun!r}, which cannot be called", "Write stowax.jit(train_step)."
        )
    what = known(fun, jax_options).told(
        static_argnums, static_argnames, donate_argnums, donate_argnames
    )
    wishes = wished({name: options[name] for name in WISHES})
    return Planned(what, wishes, given_plan(plan, wishes.compiler_options))


def _check_names(jax_options: Mapping[str, Any]) -> None:
    """**Raises:** `CallError` for an option that neither `jit` nor `jax.jit` has."""
    known_to_jax = inspect.signature(jax.jit).parameters
    for name, value in jax_options.items():
        if name not in known_to_jax:
            near = did_you_mean(
                name, {**inspect.signature(jit).parameters, **known_to_jax}
            )
            raise CallError(
                name,
                f"{value!r:.60}",
                f"{near}It is no option of stowax.jit, nor of jax.jit.",
            )
