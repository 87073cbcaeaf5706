"""Small steps to plan: a residual MLP whose activations outweigh its weights.

A layer reads x of b rows and w columns, and makes three arrays of b × 4w (one is the
product, the others are element by element) and two of b × w.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stowax
from stowax._errors import MissingExtraError

WIDTH, ROWS, LAYERS = 256, 4096, 4
MIB = 2**20
# Five times faster TPU compiles, for programs that nobody is going to run. Newer JAX
# has no such option.
QUICK = (
    {"exec_time_optimization_effort": -1.0} if jax.__version_info__ < (0, 11) else {}
)
RATE = np.float32(0.01)


def spec(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def layer(x, w):
    return x + jnp.tanh(jax.nn.gelu(x @ w["up"]) @ w["down"])


def forward(params, x):
    """Layers stacked for a scan, or a list of them."""
    if isinstance(params, list):
        for w in params:
            x = layer(x, w)
        return x
    return jax.lax.scan(lambda c, w: (layer(c, w), None), x, params)[0]


def weights(layers=LAYERS, width=WIDTH, unrolled=False, dtype=jnp.float32):
    one = {
        "up": spec(width, 4 * width, dtype=dtype),
        "down": spec(4 * width, width, dtype=dtype),
    }
    if unrolled:
        return [one] * layers
    return jax.tree.map(lambda s: spec(layers, *s.shape, dtype=dtype), one)


def tanh_loss(weights, x):
    """A loss over the layers of a Python loop that are a matrix each."""
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def descend(params, grads):
    return jax.tree.map(lambda p, g: p - RATE.astype(p.dtype) * g, params, grads)


def step_of(loss):
    """Gradient descent on `loss(params, *batch)`."""

    def step(params, *batch):
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return descend(params, grads), value

    return step


@stowax.stow
def mean_square(params, x):
    return jnp.mean(forward(params, x) ** 2)


train = step_of(mean_square)


def arguments(layers=LAYERS, width=WIDTH, rows=ROWS, unrolled=False):
    return weights(layers, width, unrolled), spec(rows, width)


def numbers(specs, seed=0):
    """Arrays like `specs`."""
    draw = np.random.default_rng(seed)
    return jax.tree.map(
        lambda s: jnp.asarray(draw.normal(size=s.shape) * 0.05, s.dtype), specs
    )


def bytes_of(tree):
    return sum(s.size * s.dtype.itemsize for s in jax.tree.leaves(tree))


def total(memory):
    """What a program needs on the device, from XLA's own figures."""
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )


def compiled_total(plan, step, *args):
    """The device total of a plan's program, compiled apart from the plan."""
    program = stowax.target(plan.target).compile(plan.apply(step), *specs(plan, *args))
    return total(program.memory_analysis())


def specs(plan, *args):
    found = plan.specs(*args)
    return found if len(args) > 1 else (found,)


def plan(step, *args, target="h200", **options):
    """`stowax.plan`, in silence; a test whose compiler is not installed is skipped."""
    if target.startswith("v"):
        options["compiler_options"] = QUICK | options.get("compiler_options", {})
        options.setdefault("compiles", 4)  # `test_finish` has one that is finished
    options.setdefault("progress", False)
    try:
        return stowax.plan(step, *args, target=target, **options)
    except MissingExtraError as error:
        pytest.skip(str(error))


def target_or_skip(name):
    """`stowax.target`; a test whose compiler is not installed is skipped."""
    try:
        return stowax.target(name)
    except MissingExtraError as error:
        pytest.skip(str(error))


def kinds(tree):
    """In which memories the arrays of a tree are."""
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree) if leaf.ndim}


@functools.cache
def planned(target="h200", budget=None):
    """The plan of `train` that several tests look at; `None` is all of the device."""
    return plan(train, *arguments(), target=target, budget=budget)
