"""Losses as people write them, for tests of blocks of tokens, and their programs."""

import jax
import jax.numpy as jnp
import optax

from stowax._jaxprs._jaxpr import Program, inline

B, T, D, V = 4, 256, 32, 256


def inputs(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (B, T, D), dtype)
    head = jax.random.normal(keys[1], (D, V), dtype) / D**0.5
    labels = jax.random.randint(keys[2], (B, T), 0, V)
    mask = jax.random.uniform(keys[3], (B, T)) > 0.2
    return x, head, labels, mask


# --- the losses that people write -----------------------------------------------------


def by_index(x, head, labels, mask):
    return optax.softmax_cross_entropy_with_integer_labels(x @ head, labels).mean()


def one_hot_masked(x, head, labels, mask):
    losses = optax.softmax_cross_entropy(x @ head, jax.nn.one_hot(labels, V))
    return (losses * mask).sum() / mask.sum()


def smoothed(x, head, labels, mask):
    wanted = jax.nn.one_hot(labels, V) * 0.9 + 0.1 / V
    return -(wanted * jax.nn.log_softmax(x @ head)).sum(-1).mean()


def shifted(x, head, labels, mask):
    logits = (x @ head)[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels[:, 1:]).mean()


def flat(x, head, labels, mask):
    logits = x.reshape(-1, D) @ head
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels.reshape(-1))
    return jnp.where(mask.reshape(-1), losses, 0).sum() / mask.sum()


def capped(x, head, labels, mask):
    """As Gemma's: a soft cap, a z-loss, weights, and the accuracy beside it."""
    logits = 30 * jnp.tanh(jnp.einsum("btd,dv->btv", x, head) / 30)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    label = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    losses = (log_z - label + 1e-4 * log_z**2) * mask
    right = (logits.argmax(-1) == labels).mean()
    return losses.sum() / jnp.maximum(mask.sum(), 1), right


def by_probability(x, head, labels, mask):
    p = jax.nn.softmax(x @ head)
    return -jnp.log(jnp.take_along_axis(p, labels[..., None], -1)).mean()


def distilled(x, head, labels, mask):
    taught = jax.lax.stop_gradient(x[:, 1:] @ head * 2)
    log_p, log_q = (jax.nn.log_softmax(z) for z in (taught, x[:, :-1] @ head))
    return (jnp.exp(log_p) * (log_p - log_q)).sum(-1).mean()


def head_first(x, head, labels, mask):
    """The head as the left operand, its bias and a temperature per token."""
    logits = jnp.einsum("vd,btd->btv", head.T, x) + jnp.arange(V) / V
    logits = logits / (1 + mask)[..., None]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum()


def per_example(x, head, labels, mask):
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ head, labels)
    return losses.mean(), losses


LOSSES = (
    *(by_index, one_hot_masked, smoothed, shifted, flat, capped, by_probability),
    *(distilled, head_first, per_example),
)


def over_tokens(x, head, labels, mask):
    """Tokens know of one another, and the words do not."""
    return jax.nn.log_softmax(x @ head, axis=(0, 1)).mean()


def mixed_tokens(x, head, labels, mask):
    logits = x @ head
    return (logits * jnp.roll(logits, 1, (0, 1))).mean()


def program_of(function, *args):
    return Program(inline(jax.make_jaxpr(function)(*args)))


def results(program, args):
    """Gradients by the first two arguments, and everything that comes out."""

    def loss(x, head):
        given = dict(enumerate((x, head, *args[2:])))
        out = program.run([*program.outputs_read], given)
        out = program.read_outputs(out, len(program.outputs))
        return out[0], out

    grads, out = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(*args[:2])
    return grads, out
