"""Steps run as decisions say, beside the same steps as they are written.

`check` traces a step, makes random decisions for every stack that was found, and
compares the planned step with the plain one: to the bit without fusion
(`jax.disable_jit`), within the rounding of the dtype when compiled.
"""

import contextlib
import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np

from stowax._jaxprs._jaxpr import is_float
from stowax._records._stages import Options
from stowax._step._trace import available, store_all, trace_step
from stowax._survey._apply import StackPlan, StepPlan, apply_decisions
from updates import without_copies

WAYS = ("keep", "offload", "offload early", "offload ahead")


def recompute_all(stack, body):
    """Only what cannot be computed again is stored: carried inputs that are read."""
    return dict.fromkeys(_unreachable(stack, body, ()), "keep")


def offload_inputs(stack, body):
    """The same, in host memory."""
    return dict.fromkeys(_unreachable(stack, body, ()), "offload")


def at_random(seed):
    """Decisions for any value, whether the backward pass reads it or not."""
    draw = random.Random(seed)

    def choose(stack, body):
        at_hand = available(stack, body)
        stored = {}
        for number, aval in enumerate(body.forward.avals):
            if number in at_hand:
                continue
            often = 0.5 if number in body.residuals else 0.1
            if draw.random() < often:
                stored[number] = draw.choice(WAYS)
                if not is_float(aval):
                    stored[number] = "keep"
        for number in _unreachable(stack, body, stored):
            floating = is_float(body.forward.avals[number])
            stored[number] = draw.choice(WAYS) if floating else "keep"
        return stored

    return choose


def kept_at_random(seed):
    """The same, nothing in host memory of layers as they are written, or in groups."""
    choose = at_random(seed)

    def kept(stack, body):
        stored = choose(stack, body)
        stays = stack.as_written or stack.group
        return dict.fromkeys(stored, "keep") if stays else stored

    return kept


def _unreachable(stack, body, stored):
    """Carried inputs that the backward pass reads, given what is stored."""
    program = body.forward
    at_hand = available(stack, body) | set(stored)
    run = program.closure(body.residuals, at_hand)
    read = {*body.residuals, *(i for k in run for i in program.nodes[k].inputs)}
    return sorted(n for n in stack.carry_inputs if n in read and n not in at_hand)


CHOICES = {
    "store all": store_all,
    "recompute all": recompute_all,
    "offload inputs": offload_inputs,
}


def plans(traced, choose):
    return {
        name: StackPlan(
            fingerprint=found.body.forward.fingerprint,
            stored=choose(found.stack, found.body),
        )
        for name, found in traced.stacks.items()
    }


def planned(step, args, choose, options=None, traced=None):
    """The step under decisions."""
    options = options or Options()
    traced = traced or trace_step(step, args, options)
    return apply_decisions(step, StepPlan(stacks=plans(traced, choose)), options)


def counts(traced):
    """How often each stack's body runs, in program order."""
    return [found.stack.count for found in traced.stacks.values()]


@contextlib.contextmanager
def unfused():
    """Every operation runs by itself, in the memory that it is given; none is fused."""
    with jax.disable_jit(), without_copies():
        yield


def fresh(args):
    """The same arrays in containers of their own: run without `jit`, a step that writes
    into NNX variables writes into those it was given."""
    return jax.tree.map(lambda leaf: leaf, args)


def plain(leaf):
    key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if key else leaf)


def assert_same_bits(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for (path, a), b in zip(
        jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True
    ):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(
            plain(a), plain(b), err_msg=jax.tree_util.keystr(path)
        )


def assert_close(got, expected, roundings=256):
    """Equal up to `roundings` units in the last place of the largest element of a leaf,
    and a few of the largest of all (a gradient that is zero but for rounding)."""
    sizes = [_largest(leaf) for leaf in jax.tree.leaves(expected)]
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for (path, a), b in zip(
        jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True
    ):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        where = jax.tree_util.keystr(path)
        if not jnp.issubdtype(a.dtype, jnp.floating):
            np.testing.assert_array_equal(plain(a), plain(b), err_msg=where)
            continue
        unit = float(jnp.finfo(a.dtype).eps)
        a, b = (np.asarray(v, np.float64) for v in (a, b))
        tolerance = unit * (roundings * _largest(b) + 16 * max(sizes))
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance, err_msg=where)


def _largest(leaf):
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
        return 0.0
    return float(np.max(np.abs(np.asarray(leaf, np.float64)), initial=0.0))


def check(
    step, args, found, *, seeds=(0,), choices=tuple(CHOICES), options=None, exact=True
):
    """Compares under several decisions; `found` is how often each stack's body runs.

    `exact` is false where the order in which plain JAX adds cotangents cannot be kept,
    and `None` where there is nothing to compare without fusion.
    """
    options = options or Options()
    traced = trace_step(step, args, options)
    assert counts(traced) == list(found)
    expected = jax.jit(step)(*args)
    with unfused():
        separate = step(*fresh(args))
    chosen = [CHOICES[c] for c in choices] + [at_random(seed) for seed in seeds]
    runs = [planned(step, args, choose, options, traced) for choose in chosen]
    straight = dataclasses.replace(options, as_written=True, segments=True)
    cut = trace_step(step, args, straight)
    assert cut.recording.left == traced.recording.left
    for choose in (recompute_all, kept_at_random(0)):
        runs.insert(0, planned(step, args, choose, straight, cut))
    for run in runs:
        if exact is not None:
            with unfused():
                got = run(*fresh(args))
            (assert_same_bits if exact else assert_close)(got, separate)
    assert_close(run(*args), expected)  # the last decisions, compiled
    return traced
