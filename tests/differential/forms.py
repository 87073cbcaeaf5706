"""How a step gets its gradients: `FORMS` by name.

Each is called with the losses, the trained weights, the batch and the key, and returns
the loss, the gradients and the means of the layers (or nothing of them).
"""

import jax
import jax.numpy as jnp
from jax import lax

T = jax.tree.map


def _norm(tree):
    return jnp.sqrt(sum(jnp.sum(jnp.square(a)) for a in jax.tree.leaves(tree)))


def _value_and_grad(losses, p, batch, key):
    return *jax.value_and_grad(losses.plain)(p, batch, key), None


def _grad_aux(losses, p, batch, key):
    def both(p, batch, key):
        loss, means = losses.more(p, batch, key)
        return loss, (loss, means)

    grads, (loss, means) = jax.grad(both, has_aux=True)(p, batch, key)
    return loss, grads, means


def _has_aux(losses, p, batch, key):
    (loss, means), grads = jax.value_and_grad(losses.more, has_aux=True)(p, batch, key)
    return loss, grads, means


def _measured(losses, p, batch, key):
    run = jax.value_and_grad(losses.outputs, has_aux=True)
    (loss, outputs), grads = run(p, batch, key)
    outputs = outputs.astype(jnp.float32)
    wanted = batch["tokens"] % outputs.shape[-1]
    chosen = jnp.max(jax.nn.log_softmax(outputs), axis=-1)
    right = jnp.argmax(outputs, axis=-1) == wanted
    return loss, grads, jnp.stack([jnp.mean(chosen), jnp.mean(right)])


def _vjp(losses, p, batch, key):
    loss, back = jax.vjp(lambda p: losses.plain(p, batch, key), p)
    (grads,) = back(jnp.ones_like(loss))
    return loss, grads, None


def _argnums(losses, p, batch, key):
    def by_x(p, x):
        return losses.plain(p, {**batch, "x": x}, key)

    loss, (grads, more) = jax.value_and_grad(by_x, argnums=(0, 1))(p, batch["x"])
    return loss, grads, _norm(more)


def _keywords(losses, p, batch, key):
    return *jax.value_and_grad(losses.plain)(p, batch=batch, key=key), None


def _perturbed_twice(losses, p, batch, key):
    first = jax.grad(losses.plain)(p, batch, key)
    scale = 0.05 / (_norm(first) + 0.1)
    moved = T(lambda p, g: p + (scale * g).astype(p.dtype), p, first)
    return *jax.value_and_grad(losses.plain)(moved, batch, key), None


def _gan(losses, p, batch, key):
    inner = {k: v for k, v in p.items() if k in ("layers", "more")}
    outer = {k: v for k, v in p.items() if k not in inner}
    other = {**batch, "x": jnp.tanh(batch["x"])}
    by_inner = lambda part: losses.plain({**p, **part}, batch, key)
    by_outer = lambda part: losses.plain({**p, **part}, other, key)
    first, one = jax.value_and_grad(by_inner)(inner)
    second, two = jax.value_and_grad(by_outer)(outer)
    return first - 0.5 * second, {**one, **two}, None


def _actor_critic(losses, p, batch, key):
    other = {**batch, "x": 0.5 * batch["x"]}
    first, one = jax.value_and_grad(losses.plain)(p, batch, key)
    second, two = jax.value_and_grad(losses.plain)(p, other, key)
    return first + second, T(lambda a, b: a + 0.5 * b, one, two), None


def _parts(batch):
    return T(lambda a: a.reshape(2, a.shape[0] // 2, *a.shape[1:]), batch)


def _accumulate_scan(losses, p, batch, key):
    def one(carry, part):
        loss, grads = jax.value_and_grad(losses.plain)(p, part, key)
        return T(jnp.add, carry, (loss, grads)), None

    start = (jnp.float32(0), T(jnp.zeros_like, p))
    (loss, grads), _ = lax.scan(one, start, _parts(batch))
    return loss / 2, T(lambda g: g / 2, grads), None


def _accumulate_loop(losses, p, batch, key):
    loss, grads = jnp.float32(0), T(jnp.zeros_like, p)
    for k in range(2):
        part = T(lambda a, k=k: a[k], _parts(batch))
        one, more = jax.value_and_grad(losses.plain)(p, part, key)
        loss, grads = loss + one / 2, T(lambda a, b: a + b / 2, grads, more)
    return loss, grads, None


def _per_example(losses, p, batch, key):
    each = T(lambda a: a[:, None], batch)
    run = jax.vmap(jax.value_and_grad(losses.plain), in_axes=(None, 0, None))
    loss, grads = run(p, each, key)
    return jnp.mean(loss), T(lambda g: jnp.mean(jnp.tanh(g), axis=0), grads), None


def _jit_around(losses, p, batch, key):
    return *jax.value_and_grad(jax.jit(losses.plain))(p, batch, key), None


def _jit_of_gradient(losses, p, batch, key):
    return *jax.jit(jax.value_and_grad(losses.plain))(p, batch, key), None


def _checkpoint_around(losses, p, batch, key):
    return *jax.value_and_grad(jax.checkpoint(losses.plain))(p, batch, key), None


def _scan_around(losses, p, batch, key):
    def total(p):
        add = lambda sum, part: (sum + losses.plain(p, part, key), None)
        return lax.scan(add, jnp.float32(0), _parts(batch))[0]

    return *jax.value_and_grad(total)(p), None


def _vmap_around(losses, p, batch, key):
    def mean(p):
        return jnp.mean(
            jax.vmap(lambda part: losses.plain(p, part, key))(_parts(batch))
        )

    return *jax.value_and_grad(mean)(p), None


def _jacrev(losses, p, batch, key):
    def each(p):
        return jax.lax.map(lambda part: losses.plain(p, part, key), _parts(batch))

    two = jax.jacrev(each)(p)
    return jnp.sum(each(p)), T(lambda j: jnp.sum(j, axis=0), two), None


FORMS = {
    "value_and_grad": _value_and_grad,
    "grad aux": _grad_aux,
    "has_aux": _has_aux,
    "measured": _measured,
    "vjp": _vjp,
    "argnums": _argnums,
    "keyword arguments": _keywords,
    "perturbed twice": _perturbed_twice,
    "gan": _gan,
    "actor critic": _actor_critic,
    "accumulate scan": _accumulate_scan,
    "accumulate loop": _accumulate_loop,
    "per example": _per_example,
    "jit around": _jit_around,
    "jit of gradient": _jit_of_gradient,
    "checkpoint around": _checkpoint_around,
    "scan around": _scan_around,
    "vmap around": _vmap_around,
    "jacrev": _jacrev,
}
