"""Llama 2 at its published sizes, fully sharded over a mesh (FSDP).

The model is `scan_transformer`; what is added is where the arrays lie (`_fsdp`), the
names that published checkpoint policies ask for (`_named`), and such a policy, where
the step is to do by hand what stowax would plan.

The mesh comes from a `stowax.Target`, so that the step can be planned and compiled for
chips that are not there:

>>> step, args = llama2_13b(stowax.target("v5p-8"))

Sizes: Touvron et al., "Llama 2: Open Foundation and Fine-Tuned Chat Models" (2023), and
the configuration files published with the weights.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import stowax
from benchmarks.models import _fsdp, _layers, _named, scan_transformer
from benchmarks.models._fsdp import AXIS, partition
from benchmarks.models.scan_transformer import SMALL, Config, Step

LLAMA2_7B = Config(
    layers=32,
    width=4096,
    heads=32,
    key_value_heads=32,
    feed_forward=11_008,
    vocabulary=32_000,
    sequence=2048,
    batch=32,
)
LLAMA2_13B = dataclasses.replace(
    LLAMA2_7B, layers=40, width=5120, heads=40, key_value_heads=40, feed_forward=13_824
)
LLAMA2_70B = dataclasses.replace(
    LLAMA2_7B, layers=80, width=8192, heads=64, key_value_heads=8, feed_forward=28_672
)


def layer(
    weights: dict[str, Array], x: Array, table: tuple[Array, Array], mask: Array
) -> Array:
    """`scan_transformer.layer`, its values named as MaxText names them."""
    x = _named.layer_input(x)
    normed = _layers.rms_norm(x, weights["attention_norm"])
    query, key, value = _named.query_key_value(weights, normed, table)
    mixed = _layers.attention(query, key, value, mask)
    x = x + _named.joined(mixed, weights["output"])
    normed = _layers.rms_norm(x, weights["feed_forward_norm"])
    return x + _named.gated(weights, normed)


def forward(
    config: Config,
    parameters: dict[str, Any],
    inputs: Array,
    constrain: Callable[[Array], Array],
    policy: Any = None,
) -> Array:
    """Logits [b s v] of `inputs` [b s], the layers under `policy` if there is one."""
    table = _layers.rotary_table(inputs.shape[1], config.head_width)
    mask = _layers.causal_mask(inputs.shape[1])
    x = constrain(parameters["embedding"][inputs].astype(config.compute))
    x = _named.scan_layers(
        lambda x, weights: constrain(layer(weights, x, table, mask)),
        x,
        parameters["layers"],
        policy,
    )
    x = _layers.rms_norm(x, parameters["norm"])
    return x @ parameters["head"].astype(x.dtype)


def make_step(
    config: Config, mesh: Mesh, *, update: bool = True, policy: Any = None
) -> Step:
    """The training step on `mesh`; `update` as in `_fsdp.make_step`.

    With a checkpoint `policy` it is a step by hand, else one for stowax to plan.
    """
    constrain = _fsdp.along_batch(mesh)

    @stowax.stow
    def loss_fn(parameters: dict[str, Any], batch: dict[str, Array]) -> Array:
        logits = forward(config, parameters, batch["inputs"], constrain, policy)
        return jnp.mean(_layers.cross_entropy(logits, batch["labels"]))

    optimizer = scan_transformer.optimizer(config)
    return _fsdp.make_step(loss_fn, optimizer, mesh, update=update)


def on_target(
    config: Config,
    target: Any,
    *,
    update: bool = True,
    policy: Any = None,
    weights: jax.typing.DTypeLike = jnp.float32,
) -> tuple[Step, tuple[Any, ...]]:
    """Step and sharded `jax.ShapeDtypeStruct`s of `config` on all devices of `target`.

    **Arguments:** `target` offers `devices` and `mesh(shape, axis_names)`; `update` and
    `policy` as in `make_step`; `weights` is the dtype of parameters and moments.

    **Raises:** `ValueError` where the batch does not divide among the devices.
    """
    mesh = _fsdp.mesh_of(target, config.batch)
    specs = _fsdp.specs_of(
        mesh,
        lambda: scan_transformer.initial_parameters(config, jax.random.key(0)),
        lambda: scan_transformer.random_batch(config),
        optimizer=scan_transformer.optimizer(config) if update else None,
        weights=weights,
    )
    return make_step(config, mesh, update=update, policy=policy), specs


def published(
    config: Config, target: Any, **options: Any
) -> tuple[Step, tuple[Any, ...]]:
    """`on_target`; options that it does not know replace fields of `config`."""
    sizes = {f.name for f in dataclasses.fields(config)} & options.keys()
    config = dataclasses.replace(config, **{name: options.pop(name) for name in sizes})
    return on_target(config, target, **options)


def llama2_7b(target: Any, **options: Any) -> tuple[Step, tuple[Any, ...]]:
    """Llama 2 7B on `target`; options as in `published`."""
    return published(LLAMA2_7B, target, **options)


def llama2_13b(target: Any, **options: Any) -> tuple[Step, tuple[Any, ...]]:
    """Llama 2 13B on `target`, 32 sequences of 2048 tokens unless told other."""
    return published(LLAMA2_13B, target, **options)


def llama2_70b(target: Any, **options: Any) -> tuple[Step, tuple[Any, ...]]:
    """Llama 2 70B on `target`; 8 key/value heads are shared by 64 query heads."""
    return published(LLAMA2_70B, target, **options)


def llama2_13b_v5p_8() -> tuple[Step, tuple[Any, ...]]:
    """The full training step of 13B on the 4 chips of a v5p-8."""
    return llama2_13b(stowax.target("v5p-8"))


def llama2_13b_loss_and_gradients_v5p_8() -> tuple[Step, tuple[Any, ...]]:
    """Loss and gradients of 13B on the 4 chips of a v5p-8, without an optimizer."""
    return llama2_13b(stowax.target("v5p-8"), update=False)


def small() -> tuple[Step, tuple[Any, ...]]:
    """Step and real arrays on one attached device, for numerics on a CPU."""
    mesh = Mesh(jax.devices()[:1], (AXIS,))
    state = scan_transformer.initial_state(SMALL)
    batch = scan_transformer.random_batch(SMALL)
    state = jax.tree.map_with_path(
        lambda path, leaf: jax.device_put(
            leaf, NamedSharding(mesh, partition(path, leaf))
        ),
        state,
    )
    batch = jax.device_put(batch, NamedSharding(mesh, PartitionSpec(AXIS, None)))
    return make_step(SMALL, mesh), (state, batch)
