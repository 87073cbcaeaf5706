"""PaliGemma 2, fine-tuned as in the published host-offloading experiment.

SigLIP's tower sees an image of 224 pixels as 256 tokens; a linear connector puts them
before the text in Gemma 2's layers, which attend to image and prompt in both
directions and to the answer causally. Only the attention of the language model is
trained, by gradient descent; all else is frozen and kept in bfloat16. 256 sequences of
256 text tokens, as published (the recipe's `seq_length` counts the text).

The step is `(trained, frozen, batch) -> (trained, metrics)`.

>>> step, args = paligemma2_28b(stowax.target("v5p-8"))

Sizes: Steiner et al., "PaliGemma 2: A Family of Versatile VLMs for Transfer" (2024),
and the configuration files published with the weights.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

import stowax
from benchmarks.models import _fsdp, _layers, gemma2, vision
from benchmarks.models._fsdp import Step

TRAINED = ("query", "key", "value", "output")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Tower and language model; `language.sequence` counts text tokens.

    The first `prompt` of them are a prompt, attended to in both directions and not
    predicted.
    """

    language: gemma2.Config
    tower: vision.Config = vision.SIGLIP
    prompt: int = 64
    learning_rate: float = 7.5e-4


def _published(language: gemma2.Config) -> Config:
    sizes = {"vocabulary": 257_216, "sequence": 256, "batch": 256}
    return Config(language=dataclasses.replace(language, **sizes))


PALIGEMMA2_3B = _published(gemma2.GEMMA2_2B)
PALIGEMMA2_10B = _published(gemma2.GEMMA2_9B)
PALIGEMMA2_28B = _published(gemma2.GEMMA2_27B)
SMALL = Config(language=gemma2.SMALL, tower=vision.SMALL, prompt=4, learning_rate=1e-2)


def initial_parameters(config: Config, key: Array) -> dict[str, Any]:
    """Float32 parameters, what is trained apart from what is frozen."""
    keys = jax.random.split(key, 3)
    language = gemma2.initial_parameters(config.language, keys[0])
    layers = language.pop("layers")
    connector = (config.tower.width, config.language.width)

    def part(trained: bool) -> dict[str, Any]:
        return {
            kind: {n: w for n, w in weights.items() if (n in TRAINED) == trained}
            for kind, weights in layers.items()
        }

    return {
        "trained": {"layers": part(True)},
        "frozen": language
        | {
            "layers": part(False),
            "tower": vision.initial_encoder(config.tower, keys[1]),
            "connector": _layers.normal(keys[2], connector, connector[0]),
            "connector_bias": jnp.zeros(connector[1:], jnp.float32),
        },
    }


def attended(images: int, prompt: int, length: int) -> Array:
    """Boolean [1 q k]: image and prompt see one another, the rest what is before it."""
    position = jnp.arange(length, dtype=jnp.int32)
    before = position[None, :] <= position[:, None]
    return (before | (position < images + prompt)[None, :])[None, :, :]


def loss(
    config: Config,
    trained: dict[str, Any],
    frozen: dict[str, Any],
    batch: dict[str, Array],
    constrain: Any,
    policy: Any,
) -> Array:
    """Mean cross entropy of the answer's tokens."""
    language = config.language
    tower = vision.encode(config.tower, frozen["tower"], batch["images"], constrain)
    seen = vision.linear(frozen, "connector", tower)
    text = gemma2.embedded(language, frozen["embedding"], batch["inputs"])
    x = constrain(jnp.concatenate([seen, text], axis=1))
    layers = {
        kind: trained["layers"][kind] | frozen["layers"][kind] for kind in gemma2.KINDS
    }
    # 512 tokens are within the local layers' window of 4096.
    mask = attended(seen.shape[1], config.prompt, x.shape[1])
    masks = dict.fromkeys(gemma2.KINDS, mask)
    x = gemma2.run_layers(language, layers, x, masks, constrain, policy)
    answer = x[:, seen.shape[1] + config.prompt :]
    answer = gemma2.norm(answer, frozen["norm"])
    found = gemma2.logits(frozen["embedding"], answer)
    return jnp.mean(_layers.cross_entropy(found, batch["labels"][:, config.prompt :]))


def make_step(config: Config, mesh: Mesh, *, policy: Any = None) -> Step:
    """The training step `(trained, frozen, batch) -> (trained, metrics)` on `mesh`."""
    constrain = _fsdp.along_batch(mesh)

    @stowax.stow
    def loss_fn(trained: Any, frozen: Any, batch: dict[str, Array]) -> Array:
        return loss(config, trained, frozen, batch, constrain, policy)

    def train_step(trained: Any, frozen: Any, batch: dict[str, Array]):
        value, gradients = jax.value_and_grad(loss_fn)(trained, frozen, batch)
        gradients = _fsdp.like_parameters(mesh, gradients)
        trained = jax.tree.map(
            lambda w, g: w - config.learning_rate * g, trained, gradients
        )
        return trained, {"loss": value}

    return train_step


def random_batch(config: Config) -> dict[str, Array]:
    """Images, and random text, each token to be followed by the next."""
    tower = dataclasses.replace(config.tower, batch=config.language.batch)
    return gemma2.random_batch(config.language) | {
        "images": vision.random_images(tower)
    }


def on_target(
    config: Config, target: Any, *, policy: Any = None, **sizes: Any
) -> tuple[Step, tuple[Any, ...]]:
    """Step and sharded specs on all devices of `target`.

    **Arguments:** a checkpoint `policy` makes it a step by hand; `sizes` replace fields
    of the language model's `Config`.
    """
    language = dataclasses.replace(config.language, **sizes)
    config = dataclasses.replace(config, language=language)
    mesh = _fsdp.mesh_of(target, language.batch)
    parameters, batch = _fsdp.specs_of(
        mesh,
        lambda: initial_parameters(config, jax.random.key(0)),
        lambda: random_batch(config),
        optimizer=None,
    )
    frozen = _fsdp.in_dtype(parameters["frozen"], jnp.bfloat16)
    frozen = _fsdp.sharded_state(mesh, frozen)
    step = make_step(config, mesh, policy=policy)
    return step, (parameters["trained"], frozen, batch)


paligemma2_3b = functools.partial(on_target, PALIGEMMA2_3B)
paligemma2_10b = functools.partial(on_target, PALIGEMMA2_10B)
paligemma2_28b = functools.partial(on_target, PALIGEMMA2_28B)


def small() -> tuple[Step, tuple[Any, ...]]:
    """Step and real arrays on one attached device, for numerics on a CPU."""
    mesh = Mesh(jax.devices()[:1], (_fsdp.AXIS,))
    parameters = initial_parameters(SMALL, jax.random.key(0))
    args = (parameters["trained"], parameters["frozen"], random_batch(SMALL))
    return make_step(SMALL, mesh), args
