"""Runs programs with their stacks rolled, and small models to do it with."""

import jax
import jax.numpy as jnp
import numpy as np

from stowax import _jax
from stowax._jaxprs._jaxpr import inline
from stowax._jaxprs._repeats import Repeat, find_repeats

WIDTH = 8


def flat(function, *args):
    return inline(jax.make_jaxpr(function)(*args))


def arrange(jaxpr, repeats):
    """An order in which equations (by position) and whole stacks can run.

    Program order, except that a stack runs where its first block stood, after the
    equations that were kept apart from it.
    """
    ends, taken = {}, set()
    for repeat in repeats:
        positions = [
            p for blocks in (repeat.blocks, repeat.apart) for b in blocks for p in b
        ]
        ends[min(positions)] = repeat
        taken.update(positions)
    order = []
    for position in range(len(_jax.open_jaxpr(jaxpr).eqns)):
        if position in ends:
            repeat = ends[position]
            order += sorted(p for block in repeat.apart for p in block)
            order.append(repeat)
        elif position not in taken:
            order.append(position)
    return order


def run_rolled(jaxpr, repeats, args):
    """The whole program, each stack run as its body, block after block."""
    opened = _jax.open_jaxpr(jaxpr)
    env = dict(zip(opened.constvars, _jax.consts_of(jaxpr), strict=True))
    env.update(zip(opened.invars, args, strict=True))

    def read(atom):
        return atom.val if isinstance(atom, _jax.Literal) else env[atom]

    for step in arrange(jaxpr, repeats):
        if isinstance(step, Repeat):
            run_stack(step, env, read)
            continue
        equation = opened.eqns[step]
        out = _jax.bind(equation, [read(v) for v in equation.invars])
        env.update(zip(equation.outvars, out, strict=True))
    return [read(v) for v in opened.outvars]


def run_stack(repeat, env, read):
    body = _jax.open_jaxpr(repeat.body)
    carry = [read(c.initial) for c in repeat.carry]
    constants = [read(c) for c in repeat.constants]
    for k in range(repeat.count):
        layer = [read(atoms[k]) for atoms in repeat.per_layer]
        results = jax.core.eval_jaxpr(body, [], *carry, *constants, *layer)
        count = len(repeat.carry)
        carry, outputs = results[:count], results[count:]
        for output, value in zip(repeat.outputs, outputs, strict=True):
            if output.variables[k] is not None:
                env[output.variables[k]] = value
    env.update({c.final: v for c, v in zip(repeat.carry, carry, strict=True)})


def check(function, *args):
    """Repeats of `function`, after checking that rolling them changes no bit."""
    jaxpr = flat(function, *args)
    repeats = find_repeats(jaxpr)
    leaves = jax.tree.leaves(args)
    consts = _jax.consts_of(jaxpr)
    want = jax.core.eval_jaxpr(_jax.open_jaxpr(jaxpr), consts, *leaves)
    have = run_rolled(jaxpr, repeats, leaves)
    for w, h in zip(want, have, strict=True):
        if jnp.issubdtype(w.dtype, jax.dtypes.prng_key):
            w, h = jax.random.key_data(w), jax.random.key_data(h)
        np.testing.assert_array_equal(np.asarray(w), np.asarray(h))
    taken = [p for r in repeats for block in r.blocks for p in block]
    assert len(taken) == len(set(taken))
    return repeats


def matrix(seed, rows=WIDTH, columns=WIDTH):
    return jax.random.normal(jax.random.key(seed), (rows, columns)) / 4


def norm(x, scale):
    return (
        x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale[None]
    )


def attention(x, memory, p):
    q, k, v = x @ p["q"], memory @ p["k"], memory @ p["v"]
    return jax.nn.softmax(q @ k.T) @ v @ p["o"]


def layer(x, p):
    h = norm(x, p["scale"])
    x = x + attention(h, h, p)
    return x + jax.nn.silu(norm(x, p["scale2"]) @ p["up"]) @ p["down"]


def weights(seed):
    square = {n: matrix(seed * 10 + i) for i, n in enumerate("qkvo")}
    return square | {
        "scale": jnp.full((WIDTH,), 1.0 + seed),
        "scale2": jnp.full((WIDTH,), 1.5 + seed),
        "up": matrix(seed * 10 + 5, WIDTH, 2 * WIDTH),
        "down": matrix(seed * 10 + 6, 2 * WIDTH, WIDTH),
    }


def dense_stack(x, ws):
    for w in ws:
        x = x + jnp.tanh(x @ w)
    return x


X = matrix(1000, 4)
