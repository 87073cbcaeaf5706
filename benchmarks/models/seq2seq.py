"""Speech to text: a pyramid of bidirectional LSTMs, and a decoder that attends to it.

Each layer of the pyramid has half the steps of the one below and twice the inputs, so
no two are alike. Time is under `lax.scan`, layers are not. The decoder attends in every
step of its first LSTM: the weights of that are kept for the backward pass.

>>> step, args = model(SMALL).real("blocks")
>>> state, metrics = jax.jit(step)(*args)

After Chan et al., "Listen, Attend and Spell" (2016), with wider layers.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import optax
from jax import Array

from benchmarks.models import _conv, _layers
from benchmarks.models._blocks import Block, Carry, Keys, Model, Weights


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Sizes of the pyramid, of the decoder, and of the batch."""

    pyramid: int = 4
    width: int = 1024
    features: int = 80
    frames: int = 1536
    vocabulary: int = 16_384
    target: int = 192
    batch: int = 128
    compute: jax.typing.DTypeLike = jnp.bfloat16


SMALL = Config(
    pyramid=2,
    width=8,
    features=6,
    frames=8,
    vocabulary=20,
    target=5,
    batch=2,
    compute=jnp.float32,
)
LARGE = Config()


def lstm_weights(keys: Keys, name: str, inputs: int, width: int) -> Weights:
    """Initial weights of an LSTM: of its inputs, of its own last output, biases."""
    return {
        f"{name}_input": _layers.normal(next(keys), (inputs, 4 * width), inputs),
        f"{name}_own": _layers.normal(next(keys), (width, 4 * width), width),
        f"{name}_bias": jnp.zeros((4 * width,), jnp.float32),
    }


def gated(total: Array, cell: Array) -> tuple[Array, Array]:
    """Output and cell [b w] after the sums [b 4w] of a step; cells are float32."""
    into, forget, out, new = jnp.split(total.astype(jnp.float32), 4, axis=-1)
    cell = jax.nn.sigmoid(forget + 1.0) * cell + jax.nn.sigmoid(into) * jnp.tanh(new)
    return (jax.nn.sigmoid(out) * jnp.tanh(cell)).astype(total.dtype), cell


def entering(weights: Weights, name: str, x: Array) -> Array:
    """What the inputs `x` [t b d] of all steps add to an LSTM's sums."""
    total = x @ weights[f"{name}_input"].astype(x.dtype)
    return _conv.bias(total, weights[f"{name}_bias"])


def lstm(weights: Weights, name: str, x: Array, *, reverse: bool = False) -> Array:
    """Outputs [t b w] of an LSTM over `x` [t b d]."""
    own = weights[f"{name}_own"].astype(x.dtype)

    def step(state: tuple[Array, Array], total: Array):
        state = gated(total + state[0] @ own, state[1])
        return state, state[0]

    shape = (x.shape[1], own.shape[0])
    first = jnp.zeros(shape, x.dtype), jnp.zeros(shape, jnp.float32)
    return jax.lax.scan(step, first, entering(weights, name, x), reverse=reverse)[1]


@dataclasses.dataclass(frozen=True, slots=True)
class Listen:
    """One LSTM forward in time and one back, over `joined` steps at once."""

    config: Config
    inputs: int
    joined: int

    def initial(self, keys: Keys) -> Weights:
        sizes = self.joined * self.inputs, self.config.width
        forth = lstm_weights(keys, "forth", *sizes)
        return forth | lstm_weights(keys, "back", *sizes)

    def __call__(self, weights: Weights, carry: Carry) -> Carry:
        x = carry["x"].astype(self.config.compute)
        t, b, d = x.shape
        x = x.reshape(t // self.joined, self.joined, b, d).swapaxes(1, 2)
        x = x.reshape(t // self.joined, b, self.joined * d)
        both = lstm(weights, "forth", x), lstm(weights, "back", x, reverse=True)
        return carry | {"x": jnp.concatenate(both, axis=-1)}


@dataclasses.dataclass(frozen=True, slots=True)
class Attend:
    """The decoder's first LSTM: each step attends, and reads what it attended to."""

    config: Config

    def initial(self, keys: Keys) -> Weights:
        c, both = self.config, 2 * self.config.width
        weights = {"embedding": _layers.normal(next(keys), (c.vocabulary, c.width), 1)}
        weights |= lstm_weights(keys, "speller", c.width, c.width)
        shapes = {"key": (both, c.width), "attended": (both, 4 * c.width)}
        for name, shape in shapes.items():
            weights[name] = _layers.normal(next(keys), shape, both)
        return weights

    def __call__(self, weights: Weights, carry: Carry) -> Carry:
        heard = carry["x"]  # [s b 2w]
        key = heard @ weights["key"].astype(heard.dtype)
        own, attended = (
            weights[name].astype(heard.dtype) for name in ("speller_own", "attended")
        )
        scale = 1.0 / math.sqrt(self.config.width)

        def step(state: tuple[Array, Array], total: Array):
            scores = jnp.einsum("sbw,bw->bs", key, state[0]).astype(jnp.float32)
            shares = jax.nn.softmax(scale * scores, axis=-1).astype(heard.dtype)
            context = jnp.einsum("bs,sbv->bv", shares, heard)
            state = gated(total + context @ attended + state[0] @ own, state[1])
            return state, (state[0], context)

        words = weights["embedding"][carry["inputs"]].astype(heard.dtype)
        shape = (words.shape[1], own.shape[0])
        first = jnp.zeros(shape, heard.dtype), jnp.zeros(shape, jnp.float32)
        entered = entering(weights, "speller", words)
        _, (outputs, contexts) = jax.lax.scan(step, first, entered)
        return carry | {"x": jnp.concatenate([outputs, contexts], axis=-1)}


@dataclasses.dataclass(frozen=True, slots=True)
class Spell:
    """The decoder's second LSTM, and the loss."""

    config: Config

    def initial(self, keys: Keys) -> Weights:
        c = self.config
        shape = (c.width, c.vocabulary)
        weights = lstm_weights(keys, "upper", 3 * c.width, c.width)
        return weights | {"head": _layers.normal(next(keys), shape, c.width)}

    def __call__(self, weights: Weights, carry: Carry) -> Carry:
        x = lstm(weights, "upper", carry["x"])
        logits = x @ weights["head"].astype(x.dtype)
        losses = _layers.cross_entropy(logits, carry["labels"])
        return carry | {"loss": jnp.mean(losses)}


def blocks(config: Config) -> list[Block]:
    """The model: a bidirectional layer, the pyramid on it, two layers of decoder."""
    upper = [Listen(config, 2 * config.width, 2)] * (config.pyramid - 1)
    return [Listen(config, config.features, 1), *upper, Attend(config), Spell(config)]


def random_batch(config: Config) -> Carry:
    """Frames [t b features], tokens, and each one's next [t b]."""
    c, (one, two) = config, jax.random.split(jax.random.key(1))
    shape = (c.frames, c.batch, c.features)
    drawn = _layers.tokens(two, (c.target + 1, c.batch), c.vocabulary)
    x = jax.random.normal(one, shape, jnp.float32)
    return {"x": x, "inputs": drawn[:-1], "labels": drawn[1:]}


def model(config: Config) -> Model:
    """The model with its optimizer: AdamW."""
    return Model(
        blocks=blocks(config),
        optimizer=optax.adamw(1e-3, weight_decay=0.01),
        batch=lambda: random_batch(config),
    )
