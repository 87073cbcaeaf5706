"""A program as a step with its arguments: state, what stands around the update."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .forms import FORMS
from .handed import handed
from .meshes import (
    MAPPED,
    in_mesh,
    mapped_mean,
    mesh_of,
    placed_batch,
    placed_state,
)
from .models import losses_of, sizes_of, weights
from .optimizers import optimizer_of

T = jax.tree.map
RATE = 0.05


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A step with the arguments of its first call.

    The first `state` of them are what a user places, the last are given by `keywords`.
    `following(args, out, k)` are the arguments of call `k`, after one that had `args`
    and returned `out`.
    """

    step: Callable[..., Any]
    args: tuple[Any, ...]
    state: int
    keywords: tuple[str, ...] = ()

    def split(self, args):
        """Positional arguments and those by keyword."""
        first = len(args) - len(self.keywords)
        return args[:first], dict(zip(self.keywords, args[first:], strict=True))

    following: Callable[..., tuple[Any, ...]]


@contextlib.contextmanager
def surroundings(program):
    """JAX as the program's script would have set it."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.numpy_dtype_promotion("standard"))
        stack.enter_context(jax.numpy_rank_promotion("allow"))
        if program.dtype == "x64":
            stack.enter_context(jax.enable_x64(True))
        stack.enter_context(in_mesh(program, mesh_of(program)))
        yield


def _split(program, params):
    """`(trained, others, join)`: what is trained, what is not, and all of it again."""
    if program.around == "frozen":
        fixed = {k: params[k] for k in ("shared", "head")}
        trained = {k: v for k, v in params.items() if k not in fixed}
        return trained, fixed, lambda trained, fixed: {**trained, **fixed}
    if program.around == "lora":
        leaves, structure = jax.tree.flatten(params)
        pairs = [
            {"a": 0.1 * w[..., :, :2], "b": 0.1 * w[..., :2, :]} if w.ndim > 1 else None
            for w in leaves
        ]

        def join(pairs, fixed):
            added = [
                w if ab is None else w + ab["a"] @ ab["b"]
                for w, ab in zip(jax.tree.leaves(fixed), pairs["pairs"], strict=True)
            ]
            return jax.tree.unflatten(structure, added)

        return {"pairs": pairs}, params, join
    return params, None, lambda trained, fixed: trained


def _batch(program, sizes, call):
    """Examples of one call, as numpy arrays."""
    random = np.random.default_rng((program.data, 1, call))
    lead = (2,) if program.around == "epoch scan" else ()
    shape = (*lead, sizes.batch, sizes.rows)
    whole = np.int64 if program.arguments == "int64 batch" else np.int32
    made = {
        "x": random.normal(size=(*shape, sizes.width)).astype(np.float32),
        "target": random.normal(size=(*shape, sizes.width)).astype(np.float32),
        "tokens": random.integers(0, 100, shape).astype(whole),
    }
    if program.arguments == "int64 batch":
        return made
    made = T(jnp.asarray, made)
    if program.arguments == "none leaf":
        made["segments"] = None
    return placed_batch(mesh_of(program), made, axis=len(lead))


def _state(program, sizes):
    """What the step reads and returns, and how its weights are joined."""
    mesh = mesh_of(program)
    trained, fixed, join = _split(program, weights(program, sizes))
    trained = placed_state(mesh, trained)
    state = {"params": trained, "opt": optimizer_of(program.optimizer)[0](trained)}
    # As a user would: the optimizer's state lies as the weights do.
    state["opt"] = placed_state(mesh, state["opt"])
    if fixed is not None:
        state["fixed"] = placed_state(mesh, fixed)
    if program.around == "ema":
        state["ema"] = T(jnp.copy, trained)
    if program.around == "previous":
        state["previous"] = T(lambda p: 0.99 * p, trained)
    if program.around == "loss scale":
        state["scale"] = placed_state(mesh, jnp.float32(64))
    if program.arguments == "key in state":
        state["key"] = placed_state(mesh, jax.random.key(3))
    if program.arguments == "statistics in state":
        state["statistics"] = placed_state(mesh, jnp.float32(0.5))
    if program.arguments == "none leaf":
        state["nothing"] = None
    return state, join


def _scaled(losses, scale):
    plain = lambda *args, **named: scale * losses.plain(*args, **named)

    def scaled(both):
        def run(*args):
            loss, more = both(*args)
            return scale * loss, more

        return run

    more, outputs = scaled(losses.more), scaled(losses.outputs)
    return dataclasses.replace(losses, plain=plain, more=more, outputs=outputs)


def _around(program, old, new, opt, loss, grads, state):
    """The state after an update, as the program's kind of training has it."""
    made = {**state, "params": new, "opt": opt}
    kind = program.around
    if kind == "ema":
        made["ema"] = T(lambda e, p: 0.9 * e + 0.1 * p, state["ema"], new)
    if kind == "previous":
        made["previous"] = old
        made["params"] = T(
            lambda n, p, q: n + (0.1 * (p - q)).astype(n.dtype),
            *(new, old, state["previous"]),
        )
    if kind in ("finite where", "loss scale"):
        good = jnp.isfinite(loss)
        keep = lambda new, old: jnp.where(good, new, old)
        made["params"] = T(keep, new, old)
        made["opt"] = T(keep, opt, state["opt"])
    if kind == "loss scale":
        made["scale"] = jnp.where(good, state["scale"] * 1.5, state["scale"] / 2)
    return made


def _host_call(loss):
    from jax.experimental import io_callback

    host = lambda value: np.float32(2 * value)
    return io_callback(host, jax.ShapeDtypeStruct((), "float32"), loss, ordered=True)


def _core(program, mark, join):
    """`(state, batch, rate, key) -> (state, metrics)`, one update."""
    mesh = mesh_of(program)
    update = optimizer_of(program.optimizer)[1]

    def core(state, batch, rate, key):
        if program.arguments == "key in state":
            after, key = jax.random.split(state["key"])
        fixed = state.get("fixed")
        losses = losses_of(program, mesh, mark, lambda p: join(p, fixed))
        if program.around == "loss scale":
            losses = _scaled(losses, state["scale"])
        old = state["params"]
        run = functools.partial(FORMS[program.form], losses)
        run = mapped_mean(run, mesh) if program.mesh == MAPPED else run
        loss, grads, means = run(old, batch, key)
        if program.around == "loss scale":
            loss = loss / state["scale"]
            grads = T(lambda g: g / state["scale"].astype(g.dtype), grads)
        if program.around == "gradients only":
            return grads, {"loss": loss, "means": means}

        def updated():
            new, opt = update(old, state["opt"], grads, rate)
            return T(lambda n, p: n.astype(p.dtype), new, old), opt

        if program.around == "finite cond":
            new, opt = lax.cond(
                jnp.isfinite(loss), updated, lambda: (old, state["opt"])
            )
        else:
            new, opt = updated()
        made = _around(program, old, new, opt, loss, grads, state)
        if program.arguments == "key in state":
            made["key"] = after
        if program.arguments == "statistics in state":
            seen = jnp.mean(batch["x"]) if means is None else jnp.mean(means)
            made["statistics"] = 0.9 * state["statistics"] + 0.1 * seen
        metrics = {"loss": loss, "means": means}
        if program.around == "debug print":
            jax.debug.print("loss {loss}", loss=loss)
        if program.around == "host call":
            metrics["seen"] = _host_call(loss)
        if program.around == "metrics":
            metrics["norm"] = T(lambda g: jnp.sqrt(jnp.sum(g * g)), grads)
            metrics["size"] = T(lambda p: jnp.max(jnp.abs(p)), made["params"])
        return made, metrics

    if program.around != "epoch scan":
        return core
    return lambda state, batches, rate, key: lax.scan(
        lambda state, batch: core(state, batch, rate, key), state, batches
    )


def build(program, mark, scale=1):
    """The step, with `mark` where the program marks what it differentiates."""
    built = _built(program, mark, scale)
    return dataclasses.replace(built, step=handed(program.handed, built.step))


def _built(program, mark, scale):
    sizes = sizes_of(program, scale)
    if program.marks == "none":
        mark = lambda function: function
    state, join = _state(program, sizes)
    core = _core(program, mark, join)
    batch = lambda call: _batch(program, sizes, call)
    kind = program.arguments
    if kind == "separate":
        rest = {k: v for k, v in state.items() if k not in ("params", "opt")}
        order = -1 if program.results == "reversed" else 1

        def train_step(params, opt, rest, batch):
            made, metrics = core(
                {"params": params, "opt": opt, **rest}, batch, RATE, jax.random.key(7)
            )
            if program.around == "gradients only":
                return made, metrics
            rest = {k: made[k] for k in rest}
            state = made["params"], made["opt"], rest
            return *state[::order], metrics

        def following(args, out, call):
            kept = args[:3] if program.around == "gradients only" else out[:3][::order]
            return (*kept, batch(call))

        args = (state["params"], state["opt"], rest, batch(0))
        return Built(
            step=train_step, args=args, state=2 + bool(rest), following=following
        )

    rates = {"python rate": RATE, "numpy rate": np.float32(RATE)}
    keys = {"typed key": jax.random.key, "raw key": jax.random.PRNGKey}

    def more(call):
        if kind in rates:
            return (rates[kind],)
        return (keys[kind](call),) if kind in keys else ()

    def train_step(state, batch, *more):
        rate = more[0] if kind in rates else RATE
        key = more[0] if kind in keys else jax.random.key(7)
        return core(state, batch, rate, key)

    def following(args, out, call):
        kept = args[0] if program.around == "gradients only" else out[0]
        return (kept, batch(call), *more(call))

    args = (state, batch(0), *more(0))
    keywords = ("batch",) if kind == "called by keyword" else ()
    return Built(
        step=train_step, args=args, state=1, keywords=keywords, following=following
    )
