"""Training loops as the documentation of JAX libraries writes them, and mended.

Each function makes a step and returns what runs it: `run(steps)` gives the losses, and
the next call goes on. `fixes` are those that an audit's report asks for, one by one:

- `"donate"`: the state's buffers are donated,
- `"prefetch"`: batches are placed ahead of use,
- `"late"`: losses are read when the loop is over.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import stowax

FIXES = ("donate", "prefetch", "late")
Run = Callable[[int], list[Any]]


class Sizes:
    """Rows of a batch, width of the layers, number of hidden layers."""

    def __init__(self, rows: int = 8, width: int = 32, layers: int = 1):
        self.rows, self.width, self.layers = rows, width, layers


def batches(sizes: Sizes, fixes: Any) -> Callable[[int], Iterator[Any]]:
    """What yields as many batches as it is asked for, and goes on the next time."""
    random = np.random.default_rng(0)

    def load(count: int) -> Iterator[Any]:
        for _ in range(count):
            x = random.normal(size=(sizes.rows, sizes.width)).astype(np.float32)
            yield x, random.integers(0, 4, sizes.rows)

    if "prefetch" in fixes:
        return lambda count: stowax.prefetch(load(count))
    return load


def _mean_loss(logits: Any, y: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def optax_loop(fixes: Any = (), sizes: Sizes | None = None) -> Run:
    """A multilayer perceptron in plain JAX, with optax."""
    sizes = sizes or Sizes()
    tx = optax.adam(1e-2)
    widths = [sizes.width] * (sizes.layers + 1) + [4]
    keys = jax.random.split(jax.random.key(0), len(widths) - 1)
    params = [
        jax.random.normal(key, (before, after)) / before**0.5
        for key, before, after in zip(keys, widths, widths[1:], strict=False)
    ]
    state = tx.init(params)

    @functools.partial(
        jax.jit, donate_argnames=("params", "state") * ("donate" in fixes)
    )
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            inner = x
            for weights in params[:-1]:
                inner = jax.nn.relu(inner @ weights)
            return _mean_loss(inner @ params[-1], y)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    load = batches(sizes, fixes)

    def run(steps: int) -> list[Any]:
        nonlocal params, state
        losses = []
        for x, y in load(steps):
            params, state, loss = step(params, state, x, y)
            losses.append(loss if "late" in fixes else float(loss))
        return jax.device_get(losses)

    return run


def nnx_loop(fixes: Any = (), sizes: Sizes | None = None) -> Run:
    """Flax NNX: a model with dropout, its optimizer, both updated in place."""
    from flax import nnx

    sizes = sizes or Sizes()
    width, layers = sizes.width, sizes.layers

    class Model(nnx.Module):
        def __init__(self, rngs: Any):
            self.layers = nnx.List(
                [nnx.Linear(width, width, rngs=rngs) for _ in range(layers)]
            )
            self.dropout = nnx.Dropout(0.1, rngs=rngs)
            self.last = nnx.Linear(width, 4, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            for layer in self.layers:
                x = nnx.relu(self.dropout(layer(x)))
            return self.last(x)

    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @functools.partial(nnx.jit, donate_argnums=(0, 1) * ("donate" in fixes))
    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        loss, grads = nnx.value_and_grad(lambda model: _mean_loss(model(x), y))(model)
        optimizer.update(model, grads)
        return loss

    load = batches(sizes, fixes)

    def run(steps: int) -> list[Any]:
        losses = []
        for x, y in load(steps):
            loss = step(model, optimizer, x, y)
            losses.append(loss if "late" in fixes else float(loss))
        return jax.device_get(losses)

    return run


def equinox_loop(fixes: Any = (), sizes: Sizes | None = None) -> Run:
    """Equinox: a model that is a pytree, and its filtered transformations."""
    import equinox as eqx

    sizes = sizes or Sizes()
    model = eqx.nn.MLP(sizes.width, 4, sizes.width, sizes.layers, key=jax.random.key(0))
    tx = optax.adam(1e-2)
    state = tx.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit(donate="all-except-first" if "donate" in fixes else "none")
    def step(batch: Any, model: Any, state: Any) -> Any:
        x, y = batch

        def loss_fn(model: Any) -> Any:
            return _mean_loss(jax.vmap(model)(x), y)

        loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
        updates, state = tx.update(grads, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state, loss

    load = batches(sizes, fixes)

    def run(steps: int) -> list[Any]:
        nonlocal model, state
        losses = []
        for batch in load(steps):
            model, state, loss = step(batch, model, state)
            losses.append(loss if "late" in fixes else loss.item())
        return jax.device_get(losses)

    return run


def naive_loop(fixes: Any = (), sizes: Sizes | None = None) -> Run:
    """As one would not write it: ten transfers a step and more; mended all at once."""
    sizes = sizes or Sizes()
    shape = (8, sizes.width)
    w: Any = jnp.ones(shape)
    if fixes:
        rate, k = jnp.float32(0.1), jnp.float32(0)

        @functools.partial(jax.jit, donate_argnums=0)
        def mended(w: Any, x: Any, rate: Any, k: Any) -> Any:
            return w - rate * x, jnp.sum(w * x), jnp.max(w) + k, k + 1

        def run_mended(steps: int) -> list[Any]:
            nonlocal w, k
            losses = []
            load = (np.full(shape, each, np.float32) for each in range(steps))
            for x in stowax.prefetch(load):
                w, loss, _, k = mended(w, x, rate, k)
                losses.append(loss)
            return jax.device_get(losses)

        return run_mended

    step = jax.jit(lambda w, x, rate, k: (w - rate * x, jnp.sum(w * x), jnp.max(w) + k))

    def run(steps: int) -> list[Any]:
        nonlocal w
        losses = []
        for k in range(steps):
            x = np.full(shape, k, np.float32)
            rows = [jax.device_put(row) for row in x]
            w, loss, largest = step(w, jnp.stack(rows), 0.1, float(k))
            losses.append(float(loss))
            np.asarray(largest)
        return losses

    return run


LOOPS = {
    "MLP, optax": optax_loop,
    "Flax NNX": nnx_loop,
    "Equinox": equinox_loop,
    "naive": naive_loop,
}
