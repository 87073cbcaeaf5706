"""How layers are repeated: `LOOPS` by name.

A loop is called with `body(p, c, x, i) -> x`, the model's parameters, what is shared,
and x; it returns x and one number per layer. `stack_of` says how its parameters lie.
"""

import jax
import jax.numpy as jnp
from jax import lax

LISTS = ("python list",)
ONE_LAYER = ("shared weights", "python shared")
TWO_STACKS = ("two stacks", "encoder decoder")


def _count(stack):
    return jax.tree.leaves(stack)[0].shape[0]


def _numbers(stack):
    return jnp.arange(_count(stack), dtype=jnp.int32)


def _picked(stack, i):
    pick = lambda w: lax.dynamic_index_in_dim(w, i, keepdims=False)
    return jax.tree.map(pick, stack)


def _mean(x):
    return jnp.mean(x.astype(jnp.float32))


def _scan(body, params, c, x, **options):
    def one(x, read):
        p, i = read
        x = body(p, c, x, i)
        return x, _mean(x)

    return lax.scan(one, x, (params["layers"], _numbers(params["layers"])), **options)


def _reversed(body, params, c, x):
    return _scan(body, params, c, x, reverse=True)


def _unroll(body, params, c, x):
    return _scan(body, params, c, x, unroll=2)


def _unused(body, params, c, x):
    stack = params["layers"]

    def one(x, read):
        p, _, i = read
        x = body(p, c, x, i)
        return x, _mean(x)

    unused = jnp.ones((_count(stack), 3), jnp.float32)
    return lax.scan(one, x, (stack, unused, _numbers(stack)))


def _outputs(body, params, c, x):
    stack = params["layers"]

    def one(x, read):
        p, i = read
        y = body(p, c, x, i)
        return y, (_mean(y), {"largest": jnp.max(jnp.abs(x)), "all": y}, i)

    x, (means, more, numbers) = lax.scan(one, x, (stack, _numbers(stack)))
    read = lax.stop_gradient(more["largest"]).astype(jnp.float32)
    return x + 0.1 * more["all"][0], means + 0.01 * read + 0.0 * numbers


def _checkpoint(body, params, c, x):
    remat = jax.checkpoint(body)
    return _scan(remat, params, c, x)


def _key_carry(body, params, c, x):
    def one(carry, read):
        x, key, count = carry
        p, i = read
        key, mine = jax.random.split(key)
        x = body(p, c | {"key": mine}, x, i)
        return (x, key, count + 1), _mean(x)

    stack = params["layers"]
    start = (x, c["key"], jnp.int32(0))
    (x, _, _), means = lax.scan(one, start, (stack, _numbers(stack)))
    return x, means


def _statistics(body, params, c, x):
    """Statistics of what the layers see are carried, and read by the next one."""

    def one(carry, read):
        x, running, count = carry
        p, i = read
        x = body(p, c, x * (1 + 0.1 * running).astype(x.dtype), i)
        running = 0.9 * running + 0.1 * lax.stop_gradient(_mean(x))
        return (x, running, count + 1), running

    stack = params["layers"]
    start = (x, jnp.float32(0), jnp.int32(0))
    (x, running, count), each = lax.scan(one, start, (stack, _numbers(stack)))
    return x, each + running / count


def _closure(body, params, c, x):
    """Only numbers are scanned; the layer picks its weights out of the stack."""
    stack = params["layers"]

    def one(x, i):
        p = _picked(stack, i)
        x = body(p, c, x, i)
        return x, _mean(x)

    return lax.scan(one, x, _numbers(stack))


def _python_list(body, params, c, x):
    means = []
    for i, p in enumerate(params["layers"]):
        x = body(p, c, x, i)
        means.append(_mean(x))
    return x, jnp.stack(means)


def _python_stacked(body, params, c, x):
    means = []
    for i in range(_count(params["layers"])):
        x = body(jax.tree.map(lambda w, i=i: w[i], params["layers"]), c, x, i)
        means.append(_mean(x))
    return x, jnp.stack(means)


def _nested(body, params, c, x):
    """Groups of layers, each a scan of its own."""
    groups = jax.tree.map(
        lambda w: w.reshape(2, w.shape[0] // 2, *w.shape[1:]), params["layers"]
    )
    numbers = _numbers(params["layers"]).reshape(2, -1)

    def inner(x, read):
        p, i = read
        x = body(p, c, x, i)
        return x, _mean(x)

    x, means = lax.scan(
        lambda x, group: lax.scan(inner, x, group), x, (groups, numbers)
    )
    return x, means.reshape(-1)


def _fori(body, params, c, x):
    stack = params["layers"]

    def one(i, x):
        p = _picked(stack, i)
        return body(p, c, x, i)

    x = lax.fori_loop(0, _count(stack), one, x)
    return x, _mean(x)[None]


def _shared(body, params, c, x, count):
    def one(x, i):
        x = body(params["layers"], c, x, i)
        return x, _mean(x)

    return lax.scan(one, x, jnp.arange(count, dtype=jnp.int32))


def _python_shared(body, params, c, x, count):
    for i in range(count):
        x = body(params["layers"], c, x, i)
    return x, _mean(x)[None]


PLAIN = {
    "scan": _scan,
    "scan reversed": _reversed,
    "scan unroll": _unroll,
    "scan unused": _unused,
    "scan outputs": _outputs,
    "scan checkpoint": _checkpoint,
    "scan key carry": _key_carry,
    "scan closure": _closure,
    "scan statistics": _statistics,
    "python list": _python_list,
    "python stacked": _python_stacked,
    "nested scan": _nested,
    "fori loop": _fori,
    "vmap examples": _scan,
}


def run_loop(program, body, other, params, c, x):
    """All layers; `other` is the body of the second stack, where there is one."""
    if program.loop in ONE_LAYER:
        run = _shared if program.loop == "shared weights" else _python_shared
        return run(body, params, c, x, program.layers)
    if program.loop == "two stacks":
        x, first = _scan(body, params, c, x)
        x, second = _scan(other, {"layers": params["more"]}, c, x)
        return x, jnp.concatenate([first, second])
    if program.loop == "encoder decoder":
        seen, first = _scan(body, params, c, x)

        def crossed(p, c, y, i):
            scores = y @ jnp.swapaxes(seen, -1, -2) / y.shape[-1]
            return other(p, c, y + 0.3 * jax.nn.softmax(scores, axis=-1) @ seen, i)

        y, second = _scan(crossed, {"layers": params["more"]}, c, jnp.tanh(x))
        return y, jnp.concatenate([first, second])
    return PLAIN[program.loop](body, params, c, x)
