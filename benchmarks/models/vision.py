"""Vision transformers: SigLIP's tower for PaliGemma 2, and ViT-g as a classifier.

Pre-norm encoder with biases, over patches of 14 pixels, layers under `lax.scan`. ViT-g
is trained whole: images to one of 1000 classes, by the mean of the last layer.

>>> step, args = vit_g(stowax.target("v6e-8"), batch=256)

Sizes: Zhai et al., "Scaling Vision Transformers" (2022), table 2; Alabdulmohsin et al.,
"Getting ViT in Shape" (2023), for SoViT-400m, which is SigLIP's.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

import stowax
from benchmarks.models import _fsdp, _layers, _named
from benchmarks.models._fsdp import Step

Weights = dict[str, Array]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Sizes of the encoder and of the batch; `compute` is the dtype of activations."""

    layers: int
    width: int
    heads: int
    feed_forward: int
    patch: int = 14
    pixels: int = 224
    classes: int = 1000
    batch: int = 256
    compute: jax.typing.DTypeLike = jnp.bfloat16
    learning_rate: float = 1e-3

    @property
    def tokens(self) -> int:
        """Number of patches of an image."""
        return (self.pixels // self.patch) ** 2


VIT_G = Config(layers=40, width=1408, heads=16, feed_forward=6144)
SIGLIP = Config(layers=27, width=1152, heads=16, feed_forward=4304)
SMALL = Config(
    layers=3,
    width=32,
    heads=4,
    feed_forward=64,
    patch=2,
    pixels=8,
    classes=10,
    batch=8,
    compute=jnp.float32,
    learning_rate=1e-2,
)


def initial_encoder(config: Config, key: Array) -> dict[str, Any]:
    """Float32 weights of patches, positions, layers and the last norm."""
    c = config
    keys = iter(jax.random.split(key, 8))
    inputs = 3 * c.patch**2
    square = (c.layers, c.width, c.width)
    products = {
        name: _layers.normal(next(keys), square, c.width)
        for name in ("query", "key", "value", "output")
    }
    into, out = (c.layers, c.width, c.feed_forward), (c.layers, c.feed_forward, c.width)
    products["up"] = _layers.normal(next(keys), into, c.width)
    products["down"] = _layers.normal(next(keys), out, c.feed_forward)
    zeros = functools.partial(jnp.zeros, dtype=jnp.float32)
    biases = {f"{n}_bias": zeros((c.layers, w.shape[2])) for n, w in products.items()}
    norms = {}
    for name in ("attention_norm", "feed_forward_norm"):
        norms[name] = jnp.ones((c.layers, c.width), jnp.float32)
        norms[f"{name}_bias"] = zeros((c.layers, c.width))
    return {
        "patches": _layers.normal(next(keys), (inputs, c.width), inputs),
        "patches_bias": zeros((c.width,)),
        "positions": _layers.normal(next(keys), (c.tokens, c.width), c.width),
        "layers": products | biases | norms,
        "norm": jnp.ones((c.width,), jnp.float32),
        "norm_bias": zeros((c.width,)),
    }


def linear(weights: Weights, name: str, x: Array) -> Array:
    """`x` [b s d] times a weight, plus its bias."""
    bias = weights[f"{name}_bias"].astype(x.dtype)
    return x @ weights[name].astype(x.dtype) + bias[None, None, :]


def normed(weights: Weights, name: str, x: Array) -> Array:
    """`x` under the layer norm called `name`."""
    return _layers.layer_norm(x, weights[name], weights[f"{name}_bias"])


def layer(config: Config, weights: Weights, x: Array) -> Array:
    """One encoder layer on `x` [b s d]."""
    x = _named.layer_input(x)
    inner = normed(weights, "attention_norm", x)
    heads = (*x.shape[:2], config.heads, config.width // config.heads)
    query, key, value = (
        checkpoint_name(linear(weights, name, inner).reshape(heads), f"{name}_proj")
        for name in ("query", "key", "value")
    )
    everything = jnp.ones((1, x.shape[1], x.shape[1]), jnp.bool_)
    mixed = _layers.attention(query, key, value, everything).reshape(x.shape)
    x = x + checkpoint_name(linear(weights, "output", mixed), "out_proj")
    up = checkpoint_name(
        linear(weights, "up", normed(weights, "feed_forward_norm", x)), "mlpwi"
    )
    fed = linear(weights, "down", jax.nn.gelu(up, approximate=True))
    return x + checkpoint_name(fed, "mlpwo")


def encode(
    config: Config,
    weights: dict[str, Any],
    images: Array,
    constrain: Any,
    policy: Any = None,
) -> Array:
    """Images [b pixels pixels 3] as normed tokens [b s d]."""
    side = config.pixels // config.patch
    cut = images.astype(config.compute).reshape(
        images.shape[0], side, config.patch, side, config.patch, 3
    )
    patches = cut.transpose(0, 1, 3, 2, 4, 5).reshape(images.shape[0], side**2, -1)
    x = linear(weights, "patches", patches)
    x = constrain(x + weights["positions"].astype(x.dtype)[None, :, :])
    x = _named.scan_layers(
        lambda x, weights: constrain(layer(config, weights, x)),
        x,
        weights["layers"],
        policy,
    )
    return normed(weights, "norm", x)


def random_images(config: Config) -> Array:
    """A batch of images, their values between -1 and 1."""
    shape = (config.batch, config.pixels, config.pixels, 3)
    return jax.random.uniform(jax.random.key(2), shape, jnp.float32, -1.0, 1.0)


def initial_parameters(config: Config, key: Array) -> dict[str, Any]:
    """Float32 parameters of the classifier."""
    below, above = jax.random.split(key)
    return {
        "encoder": initial_encoder(config, below),
        "head": _layers.normal(above, (config.width, config.classes), config.width),
    }


def random_batch(config: Config) -> dict[str, Array]:
    """Images and their classes."""
    labels = _layers.tokens(jax.random.key(1), (config.batch,), config.classes)
    return {"images": random_images(config), "labels": labels}


def optimizer(config: Config) -> optax.GradientTransformation:
    """AdamW."""
    return optax.adamw(config.learning_rate, weight_decay=0.01)


def make_step(config: Config, mesh: Mesh, *, policy: Any = None) -> Step:
    """The training step `(state, batch) -> (state, metrics)` on `mesh`."""
    constrain = _fsdp.along_batch(mesh)

    @stowax.stow
    def loss_fn(parameters: dict[str, Any], batch: dict[str, Array]) -> Array:
        encoder, images = parameters["encoder"], batch["images"]
        x = encode(config, encoder, images, constrain, policy)
        pooled = jnp.mean(x, axis=1, keepdims=True)
        found = pooled @ parameters["head"].astype(x.dtype)
        return jnp.mean(_layers.cross_entropy(found, batch["labels"][:, None]))

    return _fsdp.make_step(loss_fn, optimizer(config), mesh)


def vit_g(
    target: Any,
    *,
    policy: Any = None,
    weights: jax.typing.DTypeLike = jnp.float32,
    **sizes: Any,
) -> tuple[Step, tuple[Any, ...]]:
    """Step and sharded specs of ViT-g/14; options as in `gemma2.on_target`."""
    config = dataclasses.replace(VIT_G, **sizes)
    mesh = _fsdp.mesh_of(target, config.batch)
    specs = _fsdp.specs_of(
        mesh,
        lambda: initial_parameters(config, jax.random.key(0)),
        lambda: random_batch(config),
        optimizer=optimizer(config),
        weights=weights,
    )
    return make_step(config, mesh, policy=policy), specs


def small() -> tuple[Step, tuple[Any, ...]]:
    """Step and real arrays on one attached device, for numerics on a CPU."""
    parameters = initial_parameters(SMALL, jax.random.key(0))
    state = {"parameters": parameters, "optimizer": optimizer(SMALL).init(parameters)}
    mesh = Mesh(jax.devices()[:1], (_fsdp.AXIS,))
    return make_step(SMALL, mesh), (state, random_batch(SMALL))
