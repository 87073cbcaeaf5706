"""The model of a program: its weights, its layers in a loop, its loss, its marks."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import loops
from .layer_ops import OPS
from .meshes import SPREAD, gathered, mapped_layer, mapped_mean

VOCABULARY = 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Axes of a program's arrays."""

    batch: int
    rows: int
    width: int
    layers: int


def sizes_of(program, scale=1):
    """Tiny sizes; `scale` widens what is only compiled."""
    spread = program.mesh in SPREAD
    batch = 8 if spread else 4
    if program.size == "by accident alike":
        n = batch if scale == 1 else 16
        return Sizes(batch=n, rows=n, width=n, layers=n)
    if scale > 1:  # state is to count beside activations
        return Sizes(batch=8, rows=4 * scale, width=8 * scale, layers=program.layers)
    width = 64 if program.size == "streamed" else 16
    return Sizes(batch=batch, rows=3, width=width, layers=program.layers)


PARAMETER_TYPES = {"bfloat16": "bfloat16", "x64": "float64"}
COMPUTE_TYPES = {
    "mixed": "bfloat16",
    "bfloat16": "bfloat16",
    "mixed float16": "float16",
    "x64": "float64",
}


def _one_layer(draw, ops, sizes, *lead):
    made = {
        str(k): {
            name: draw(*lead, *shape)
            for name, shape in OPS[op].arrays(sizes.width, sizes.rows).items()
        }
        for k, op in enumerate(ops)
    }
    # A layer without weights would have nothing to scan over.
    return made if jax.tree.leaves(made) else made | {"scale": draw(*lead, sizes.width)}


def weights(program, sizes):
    """All weights, as numpy would draw them from the program's number."""
    random = np.random.default_rng(program.data)
    dtype = PARAMETER_TYPES.get(program.dtype, "float32")

    def draw(*shape):
        spread = 0.5 / np.sqrt(shape[-2] if len(shape) > 1 else 4)
        return jnp.asarray(random.normal(size=shape) * spread, dtype)

    if program.loop in loops.LISTS:
        layers = [_one_layer(draw, program.layer, sizes) for _ in range(sizes.layers)]
    else:
        lead = () if program.loop in loops.ONE_LAYER else (sizes.layers,)
        layers = _one_layer(draw, program.layer, sizes, *lead)
    made = {
        "layers": layers,
        "head": draw(sizes.width, sizes.width),
        "shared": draw(sizes.width, sizes.width),
    }
    if program.loop in loops.TWO_STACKS:
        made["more"] = _one_layer(draw, program.other, sizes, sizes.layers + 1)
    if program.loss == "tied head":
        made["table"] = draw(VOCABULARY, sizes.width)
    return made


def layer_of(program, ops, mesh):
    """One layer as a function `(p, c, x, i) -> x`."""
    compute = COMPUTE_TYPES.get(program.dtype, "float32")

    def body(p, c, x, i):
        p = jax.tree.map(lambda w: w.astype(compute), gathered(program, mesh, p))
        for k, name in enumerate(ops):
            y = OPS[name].run(p[str(k)], c, x, i).astype(x.dtype)
            x = 0.7 * x + 0.5 * y if OPS[name].added else y
        return x * (1 + p["scale"]) if "scale" in p else x

    return mapped_layer(body, mesh) if program.mesh == "shard_map layers" else body


def _identity(function):
    return function


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """What a step differentiates: `plain(params, batch, key)`, and with what else the
    model returns, or what its last layer makes. All are marked as the program says."""

    plain: Callable[..., Any]
    more: Callable[..., Any]
    outputs: Callable[..., Any]


def losses_of(program, mesh, mark, join=_identity):
    """The losses; `join` makes all weights of those that are trained."""
    whole = mark if program.marks in ("whole", "nested") else _identity
    inner = mark if program.marks in ("model", "several", "nested") else _identity
    last = mark if program.marks == "several" else _identity
    compute = COMPUTE_TYPES.get(program.dtype, "float32")
    body = layer_of(program, program.layer, mesh)
    other = layer_of(program, program.other, mesh)

    def trunk(params, batch, key):
        params = join(params)
        x = batch["x"].astype(compute)
        width = x.shape[-1]
        if program.loss == "tied head":
            table = gathered(program, mesh, params["table"])
            x = x + table.astype(compute)[batch["tokens"] % VOCABULARY]
        c = {
            "key": key,
            "order": jnp.roll(jnp.arange(width, dtype=jnp.int32), 1),
            "mask": jnp.arange(width, dtype=jnp.int32) % 3 > 0,
            "shared": gathered(program, mesh, params["shared"]),
        }

        def run(x, tokens):
            return loops.run_loop(
                program, body, other, params, c | {"tokens": tokens}, x
            )

        run = jax.vmap(run) if program.loop == "vmap examples" else run
        y, means = run(x, batch["tokens"])
        return y, jnp.atleast_2d(means).mean(axis=0)

    def criterion(params, y, batch):
        params, y = gathered(program, mesh, join(params)), y.astype(jnp.float32)
        if program.loss == "square":
            out = y @ params["head"].astype(jnp.float32)
            return jnp.mean(jnp.square(out - batch["target"]))
        if program.loss == "tied head":
            logits = y @ params["table"].astype(jnp.float32).T
            labels = batch["tokens"] % VOCABULARY
            hot = jax.nn.one_hot(labels, VOCABULARY, dtype=jnp.float32)
            return -jnp.mean(jnp.sum(hot * jax.nn.log_softmax(logits), axis=-1))
        logits = jax.nn.log_softmax(y @ params["head"].astype(jnp.float32))
        labels = (batch["tokens"] % y.shape[-1])[..., None]
        return -jnp.mean(jnp.take_along_axis(logits, labels, axis=-1))

    trunk, criterion = inner(trunk), last(criterion)

    def more(params, batch, key):
        y, means = trunk(params, batch, key)
        return criterion(params, y, batch), means

    def outputs(params, batch, key):
        y, _ = trunk(params, batch, key)
        return criterion(params, y, batch), y

    if program.mesh == "shard_map around":
        more = mapped_mean(more, mesh)
    plain = lambda params, batch, key: more(params, batch, key)[0]
    return Losses(plain=whole(plain), more=whole(more), outputs=whole(outputs))
