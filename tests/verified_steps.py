"""A small step with plans that the CPU would not make, and faults to plant in them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import stowax
from plan_parts import changed
from stowax._layers import _passes
from stowax._plan._plan import Plan
from stowax._records._plan import stored_by

LAYERS, ROWS = 4, 16
LARGE = 256  # a width at which state is large enough to be streamed


@stowax.stow
def loss_fn(params, x):
    def layer(x, w):
        return x + jnp.tanh(jnp.sin(x @ w["up"]) @ w["down"]), None

    return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)


def train_step(params, momentum, x):
    loss, grads = jax.value_and_grad(loss_fn)(params, x)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum, loss


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@functools.cache
def arguments(width=16):
    params = {
        "up": 0.1 * draw(1, LAYERS, width, 4 * width),
        "down": 0.1 * draw(2, LAYERS, 4 * width, width),
    }
    return params, jax.tree.map(jnp.zeros_like, params), draw(3, ROWS, width)


def plan_for(*args, step=train_step, **options):
    options = {"target": "cpu", "progress": False} | options
    return stowax.plan(step, *args, **options)


@functools.cache
def made(width=16):
    """A plan that offloads what it stores of a layer, and of its state the momentum.

    The CPU books no host memory, so no plan for it offloads; it runs one all the same.
    """
    pin = {"sin*": "recompute", "cos*": "recompute"}
    plan = plan_for(*arguments(width), pin=pin)
    large = {d.name for d in plan.decisions if d.role == "optimizer state"}
    return offloading(plan, large)


def offloading(plan, state=()):
    """`plan` with all that it stores of its layers offloaded, and this state."""
    (stack,) = plan.program.stacks
    stored = stored_by(plan.decisions, stack.name)
    first = (stack.name, min(stored))
    return changed(
        plan,
        arguments=tuple(
            dataclasses.replace(a, memory_kind="pinned_host") if a.path in state else a
            for a in plan.program.arguments
        ),
        decisions=tuple(
            dataclasses.replace(
                d,
                decision="offload",
                travel="early" if (d.stack, d.value) == first else None,
            )
            if d.name in state or (d.stack == stack.name and d.value in stored)
            else d
            for d in plan.decisions
        ),
        donate_argnums=(0, 1) if state else plan.program.donate_argnums,
    )


def verify(plan=None, step=train_step, args=None, **options):
    options = {"steps": 2, "progress": False} | options
    return stowax.verify(step, plan or made(), *(args or arguments()), **options)


def reload_of(value, monkeypatch):
    """A compiler's fault: the backward pass reads the next layer's slot of a value."""
    right = _passes.read_slot

    def read_slot(slots, layer, scope):
        wrong = scope.endswith(f".{value}")
        return right(slots, (layer + 1) % LAYERS if wrong else layer, scope)

    monkeypatch.setattr(_passes, "read_slot", read_slot)


def around(monkeypatch, fault, when=lambda plan: True):
    """`fault(call, out)` happens to what the planned function returns.

    `call` counts all calls of all planned functions; a plan for which `when` is false
    is spared.
    """
    right, calls = Plan.apply, []

    def apply(plan, step):
        jitted = right(plan, step)

        def run(*args):
            out = jitted(*args)
            if not when(plan) or isinstance(jax.tree.leaves(out)[0], jax.core.Tracer):
                return out  # spared, or part of another program
            calls.append(None)
            return fault(len(calls), out)

        return run

    monkeypatch.setattr(Plan, "apply", apply)


def hosted(path):
    def when(plan):
        kinds = {a.path: a.memory_kind for a in plan.program.arguments}
        return kinds[path] == "pinned_host"

    return when
