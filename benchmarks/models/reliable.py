"""The step that `reliability` kills, interrupts and damages the files of: an MLP, Adam.

As a script it is a training loop, for `stowax run` and `stowax audit`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

import stowax

LAYERS, WIDTH, ROWS = 4, 64, 512
OPTIMIZER = optax.adam(1e-3)


@stowax.stow
def loss_fn(params: Any, x: Any) -> Any:
    """The mean square of a residual network's output."""

    def layer(x: Any, w: Any) -> Any:
        return x + jnp.tanh(jax.nn.gelu(x @ w["up"]) @ w["down"]), None

    return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)


def train_step(params: Any, state: Any, x: Any) -> Any:
    """A step of Adam."""
    loss, grads = jax.value_and_grad(loss_fn)(params, x)
    updates, state = OPTIMIZER.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


def initial(width: int = WIDTH) -> Any:
    """Parameters and Adam's state."""
    up, down = jax.random.split(jax.random.key(0))
    params = {
        "up": 0.02 * jax.random.normal(up, (LAYERS, width, 4 * width)),
        "down": 0.02 * jax.random.normal(down, (LAYERS, 4 * width, width)),
    }
    return params, OPTIMIZER.init(params)


def batch(number: int, rows: int = ROWS, width: int = WIDTH) -> Any:
    """The batch of that number: the same in every process."""
    return jax.random.normal(jax.random.key(number), (rows, width))


def make() -> Any:
    """The step and its arguments, for `stowax plan FILE.py:make`."""
    return train_step, (*initial(), batch(0))


def make_of_batch(rows: int) -> Any:
    """The same for a batch size, for `stowax fit FILE.py:make_of_batch`."""
    return train_step, (*initial(), batch(0, rows))


if __name__ == "__main__":
    step, (params, state, x) = jax.jit(train_step), make()[1]
    for number in range(30):
        params, state, loss = step(params, state, batch(number))
        print(float(loss))
