"""Training steps that do not fit a small chip, each for another reason."""

import jax
import jax.numpy as jnp


def spec(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def _descent(loss, *, donate):
    def step(params, moments, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
        params = jax.tree.map(lambda p, m: p - 0.1 * m, params, moments)
        return params, moments, value

    return jax.jit(step, donate_argnums=(0, 1) if donate else ())


def logits(rows, *, width=256, layers=2, vocabulary=65536):
    """A short model with many words: what is in the way are its logits."""

    def layer(x, w):
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    def loss(params, tokens):
        x, _ = jax.lax.scan(layer, params["embed"][tokens], params["layers"])
        words = jax.nn.log_softmax(x @ params["head"], axis=-1)
        return -jnp.mean(jnp.take_along_axis(words, tokens[:, None], axis=-1))

    params = {
        "embed": spec(vocabulary, width),
        "head": spec(width, vocabulary),
        "layers": {
            "up": spec(layers, width, 4 * width),
            "down": spec(layers, 4 * width, width),
        },
    }
    return _descent(loss, donate=True), (params, params, spec(rows, dtype=jnp.int32))


def activations(rows, *, width=512, layers=8):
    """A scan that keeps everything: what is in the way are activations."""

    def layer(x, w):
        return x + jnp.tanh(x @ w[0]) @ w[1], None

    def loss(weights, x):
        return jnp.mean(jax.lax.scan(layer, x, weights)[0] ** 2)

    weights = spec(layers, width, 4 * width), spec(layers, 4 * width, width)
    return _descent(loss, donate=True), (weights, weights, spec(rows, width))


def state(width, *, layers=4, rows=1024):
    """A loop over weights, nothing donated: what is in the way is state, twice."""

    def loss(weights, x):
        for up, down in weights:
            x = x + jax.nn.relu(x @ up) @ down
        return jnp.mean(x**2)

    weights = [(spec(width, 4 * width), spec(4 * width, width))] * layers
    return _descent(loss, donate=False), (weights, weights, spec(rows, width))
