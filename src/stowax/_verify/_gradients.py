"""The gradients of a step that does not return them, without a change to its code.

A step's gradients are the cotangents of what its marked function is given. Each of
those inputs is passed through a tap, an identity whose derivative rule leaves a name on
the cotangent; the step is traced, and run as far as those names. Nothing else of the
step is in that program: no update, no state in host memory. So it is a program beside
those that train, which are compared as they are; it shows a gradient that is wrong
where a small learning rate would hide it in the rounding of a parameter.

The names are seen where the marked function is differentiated under the step's own
trace. Inside of a loop over microbatches, or under `jax.vmap`, they are not, and the
gradients are judged by the state that they make.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from .. import _jax
from .._jaxprs._jaxpr import evaluate, is_float, spec_of, trace
from .._layers._calls import name_of
from .._layers._objects import without_objects
from .._mark import current, handling
from .._plan._plan import Plan
from ._run import Version, plain_version

_PREFIX = "stowax.gradient:"


class NoGradients(Exception):
    """Why the gradients of a step cannot be looked at by themselves."""


def common_names(
    step: Callable[..., Any], plan: Plan, args: Sequence[Any]
) -> frozenset[str]:
    """The gradients that can be seen in the step with the plan and without.

    **Raises:** `NoGradients` where there are none.
    """
    plain, planned = (
        frozenset(jax.eval_shape(gradients_of(function, args), *args))
        for function in (tapped(step), _on_device(plan).apply(tapped(step)))
    )
    if not plain & planned:
        raise NoGradients("they are made inside of a loop of the step, or a jax.vmap")
    return plain & planned


def gradient_version(
    plain: Version,
    step: Callable[..., Any],
    plan: Plan | None,
    args: Sequence[Any],
    names: Collection[str],
) -> Version:
    """What runs the gradients; all of the state is on the device.

    **Arguments:** `plain` is the plain step; without a `plan` it is followed in where
    things are.
    """
    if plan is None:
        function = gradients_of(tapped(step), args, names)
        return dataclasses.replace(plain, jitted=jax.jit(function), pairs={})
    function = gradients_of(_on_device(plan).apply(tapped(step)), args, names)
    program = plan.program
    options = None if program.compile_only else dict(program.compiler_options) or None
    everywhere = plain_version(step, program.arguments, {}, (), None)
    jitted = jax.jit(function, compiler_options=options)
    return dataclasses.replace(everywhere, name="planned", jitted=jitted)


def _on_device(plan: Plan) -> Plan:
    """The plan's decisions about layers alone."""
    arguments = tuple(
        dataclasses.replace(a, memory_kind="device") for a in plan.program.arguments
    )
    program = dataclasses.replace(
        plan.program, arguments=arguments, donate_argnums=(), compiler_options={}
    )
    proof = dataclasses.replace(plan.proof, fits=True)
    return dataclasses.replace(plan, program=program, proof=proof)


def tapped(step: Callable[..., Any]) -> Callable[..., Any]:
    """`step`, whose marked functions leave names on the cotangents of their inputs.

    Whatever handles marked functions where it is called (a plan) goes on doing so.
    """

    def with_taps(*args: Any) -> Any:
        here = current()
        tapper = _Tapper(here and here.handler)
        unmarked = not _has_marks(step, args) if here is None else here.unmarked
        with handling(tapper, unmarked=unmarked) as tapping:
            out = step(*args)
        if here is not None:
            here.marked |= tapping.marked
            here.found |= tapping.found
        return out

    return with_taps


def _has_marks(step: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    with handling(lambda function, args, kwargs: function(*args, **kwargs)) as seen:
        jax.eval_shape(step, *args)
    return seen.marked


def gradients_of(
    with_taps: Callable[..., Any],
    args: Sequence[Any],
    names: Collection[str] | None = None,
) -> Any:
    """A tapped step as far as its gradients: a function of `args` returning them.

    They come as a dict, by the marked function and its argument; `names` says which
    are wanted, if not all.

    **Raises:** `NoGradients` for a step that cannot be tapped.
    """
    leaves, structure = jax.tree.flatten(tuple(args))

    def flat(*values: Any) -> Any:
        return with_taps(*jax.tree.unflatten(structure, values))

    try:
        jaxpr = trace(flat, *[spec_of(_jax.aval_of(leaf)) for leaf in leaves])
    except TypeError as error:  # a derivative of a derivative, say
        raise NoGradients("the step differentiates in a way that hides them") from error

    def gradients(*args: Any) -> dict[str, Any]:
        seen: dict[str, Any] = {}

        def visit(equation: Any, values: list[Any]) -> None:
            if equation.primitive.name == "name":
                name = equation.params["name"]
                rank, _, of = name.removeprefix(_PREFIX).partition(" ")
                # Under `jax.vmap` it has an axis more, wherever JAX puts that.
                if name.startswith(_PREFIX) and values[0].ndim == int(rank):
                    seen[_free(of, seen)] = values[0]

        evaluate(jaxpr, jax.tree.leaves(args), keep_checkpoint=_always, visit=visit)
        return {n: v for n, v in seen.items() if names is None or n in names}

    return gradients


class _Tapper:
    """A handler of marked calls that taps what they are given, and hands them on."""

    def __init__(self, following: Any):
        self.following, self.inside = following, False

    def __call__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if self.inside or _jax.under_vmap():
            return self._hand_on(function, args, kwargs)
        self.inside = True
        try:
            with without_objects(function, args, kwargs) as pure:
                given = _with_taps(name_of(function), pure.given, pure.paths())
                return pure.finish(self._hand_on(pure.function, (given,), {}))
        finally:
            self.inside = False

    def _hand_on(self, function: Any, args: Any, kwargs: Any) -> Any:
        if self.following is None:
            return function(*args, **kwargs)
        return self.following(function, args, kwargs)


def _with_taps(function: str, given: Any, paths: Sequence[str]) -> Any:
    """`given` with its floating-point arrays tapped, by the caller's `paths`."""
    leaves, structure = jax.tree.flatten(given)
    name = function.rpartition(".")[2]
    out = []
    for path, leaf in zip(paths, leaves, strict=True):
        array = hasattr(leaf, "dtype") and hasattr(leaf, "shape")
        if array and is_float(_jax.aval_of(leaf)):
            leaf = _tap(leaf, f"{_PREFIX}{leaf.ndim} {name}: {path}")
        out.append(leaf)
    return jax.tree.unflatten(structure, out)


def _tap(value: Any, name: str) -> Any:
    @jax.custom_vjp
    def tap(x: Any) -> Any:
        return x

    def forward(x: Any) -> Any:
        return x, None

    def backward(_: None, cotangent: Any) -> Any:
        return (checkpoint_name(cotangent, name),)

    tap.defvjp(forward, backward)
    return tap(value)


def _free(name: str, taken: Any) -> str:
    """`name`, numbered if the function was called before in the step."""
    names: Iterator[str] = (
        name if k == 1 else f"{name} #{k}" for k in range(1, len(taken) + 2)
    )
    return next(n for n in names if n not in taken)


def _always(_: Any) -> bool:
    return True
