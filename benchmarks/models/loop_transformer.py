"""The model of `scan_transformer` as a Python loop over a list of layers.

Same mathematics, same initial values, same sizes: only the form of the program differs,
so that a plan for the one can be compared with a plan for the other. Each layer has its
own arrays, and the traced step holds the block `layers` times.

>>> step, args = small()
>>> state, metrics = jax.jit(step)(*args)
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import stowax
from benchmarks.models import _layers, scan_transformer
from benchmarks.models.scan_transformer import MEDIUM, SMALL, Config, Step


def initial_parameters(config: Config, key: Array) -> dict[str, Any]:
    """The parameters of `scan_transformer`, those of the layers as a list."""
    stacked = scan_transformer.initial_parameters(config, key)
    layers = [
        jax.tree.map(lambda leaf, i=i: leaf[i], stacked["layers"])
        for i in range(config.layers)
    ]
    return stacked | {"layers": layers}


def forward(config: Config, parameters: dict[str, Any], inputs: Array) -> Array:
    """Logits [b s v] of token numbers `inputs` [b s]."""
    length = inputs.shape[1]
    table = _layers.rotary_table(length, config.head_width)
    mask = _layers.causal_mask(length)
    x = parameters["embedding"][inputs].astype(config.compute)
    for weights in parameters["layers"]:
        x = scan_transformer.layer(weights, x, table, mask)
    x = _layers.rms_norm(x, parameters["norm"])
    return x @ parameters["head"].astype(x.dtype)


def initial_state(config: Config) -> dict[str, Any]:
    """Parameters and optimizer state from the seed of `scan_transformer`."""
    parameters = initial_parameters(config, jax.random.key(0))
    moments = scan_transformer.optimizer(config).init(parameters)
    return {"parameters": parameters, "optimizer": moments}


def make_step(config: Config) -> Step:
    """The training step: `(state, batch) -> (state, metrics)`."""
    optimizer = scan_transformer.optimizer(config)

    @stowax.stow
    def loss_fn(parameters: dict[str, Any], batch: dict[str, Array]) -> Array:
        logits = forward(config, parameters, batch["inputs"])
        return jnp.mean(_layers.cross_entropy(logits, batch["labels"]))

    def train_step(state: dict[str, Any], batch: dict[str, Array]):
        parameters = state["parameters"]
        loss, gradients = jax.value_and_grad(loss_fn)(parameters, batch)
        parameters, moments = _layers.updated(
            optimizer, parameters, state["optimizer"], gradients
        )
        return {"parameters": parameters, "optimizer": moments}, {"loss": loss}

    return train_step


def small() -> tuple[Step, tuple[Any, ...]]:
    """Step and real arrays, for numerics on a CPU."""
    state, batch = initial_state(SMALL), scan_transformer.random_batch(SMALL)
    return make_step(SMALL), (state, batch)


def sized(config: Config) -> tuple[Step, tuple[Any, ...]]:
    """Step and `jax.ShapeDtypeStruct`s of any size."""
    state = jax.eval_shape(lambda: initial_state(config))
    batch = jax.eval_shape(lambda: scan_transformer.random_batch(config))
    return make_step(config), (state, batch)


def medium() -> tuple[Step, tuple[Any, ...]]:
    """The size of `scan_transformer.medium`, unrolled."""
    return sized(MEDIUM)
