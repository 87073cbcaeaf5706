"""The training steps of the how-to pages: a small GPT with AdamW, and a residual net.

They hold nothing of stowax. `train_step`, `state` and `batch` are as large as the pages
plan for, and only shapes: nothing is allocated. `tiny()` makes arrays for the same step
that a CPU trains on. `residual_step` takes a CPU seconds to plan and to verify.
"""

import functools

import jax
import jax.numpy as jnp
import optax

TX = optax.adamw(1e-3)


def init(key, layers, width, vocabulary):
    """Parameters and optimizer state, in float32."""
    shapes = {
        "qkv": (layers, width, 3, width),
        "out": (layers, width, width),
        "up": (layers, width, 4 * width),
        "down": (layers, 4 * width, width),
    }
    keys = jax.random.split(key, len(shapes) + 1)
    weights = {
        name: 0.02 * jax.random.normal(one, shape)
        for one, (name, shape) in zip(keys[1:], shapes.items(), strict=True)
    }
    table = 0.02 * jax.random.normal(keys[0], (vocabulary, width))
    params = {"layers": weights, "table": table}
    return params, TX.init(params)


def norm(x):
    """A layer norm without weights."""
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def layer(x, w):
    """Attention with heads of 64, then two products with a GELU between them."""
    w = jax.tree.map(lambda a: a.astype(x.dtype), w)
    split = (*x.shape[:2], -1, 64)
    q, k, v = jnp.moveaxis(jnp.einsum("btd,dke->btke", norm(x), w["qkv"]), 2, 0)
    q, k, v = (a.reshape(split) for a in (q, k, v))
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + mixed.reshape(x.shape) @ w["out"]
    return x + jax.nn.gelu(norm(x) @ w["up"]) @ w["down"]


def loss_fn(params, tokens):
    """The mean cross entropy of the next token, computed in bfloat16."""
    table = params["table"].astype(jnp.bfloat16)
    x = table[tokens[:, :-1]]
    x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, params["layers"])
    logits = (norm(x) @ table.T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def train_step(state, batch):
    """One step of AdamW."""
    params, opt_state = state
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = TX.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


state = jax.eval_shape(
    functools.partial(init, layers=24, width=1024, vocabulary=32000),
    jax.random.key(0),
)
batch = jax.ShapeDtypeStruct((32, 1025), jnp.int32)


def tiny():
    """A state and a batch for a CPU."""
    key = jax.random.key(0)
    tokens = jax.random.randint(key, (4, 65), 0, 256)
    return init(key, layers=4, width=128, vocabulary=256), tokens


def residual_loss(params, x):
    """The mean square of what residual layers return."""

    def residual(x, w):
        return x + jnp.tanh(jnp.sin(x @ w["up"]) @ w["down"]), None

    return jnp.mean(jax.lax.scan(residual, x, params)[0] ** 2)


def residual_step(params, x):
    """One step of gradient descent."""
    loss, grads = jax.value_and_grad(residual_loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def residual(layers, width, rows):
    """Parameters of `residual_step`, and a batch."""
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "up": 0.05 * jax.random.normal(keys[0], (layers, width, 4 * width)),
        "down": 0.05 * jax.random.normal(keys[1], (layers, 4 * width, width)),
    }
    return params, jax.random.normal(keys[2], (rows, width))


def parts(found, *numbers):
    """Those paragraphs of what `print(found)` shows, counted from 0."""
    paragraphs = str(found).split("\n\n")
    return "\n\n".join(paragraphs[number] for number in numbers)
