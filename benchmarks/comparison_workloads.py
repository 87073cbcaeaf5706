"""What `benchmarks.comparison` compares on: workloads, and targets that suit them.

A model on a machine has sizes with which somebody would train it there: state that fits
at least with recomputation, and a batch that keeps the chips busy. Where float32 state
does not fit, parameters and moments are bfloat16, as `weights` says. Llama2-70B on a
v5p-8 is the exception: its state fits only with host memory, so no policy by hand can
run it there. Nor does every workload go on every target.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

import stowax
from benchmarks.models import (
    _named,
    adam_tutorial,
    gemma2,
    llama,
    mixtral,
    paligemma2,
    tutorial_layers,
    vision,
)

Made = tuple[Callable[..., Any], tuple[Any, ...]]
HALF: dict[str, Any] = {"weights": jnp.bfloat16}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A training step, and where it is compared.

    `make(target, policy=..., **options)` returns the step and its specs; `targets` has
    the options per target. `by_hand` are recipes of the workload's own: functions of a
    target that return a jitted step and its specs.
    """

    make: Callable[..., Made]
    targets: Mapping[str, Mapping[str, Any]]
    what: str
    layer_input: str = _named.LAYER_INPUT
    donated: tuple[int, ...] = (0,)
    by_hand: Mapping[str, Callable[[Any], Made]] = dataclasses.field(
        default_factory=dict
    )


def _adam(target: Any, policy: Any = None) -> Made:
    """The page's step; a policy is for each of its four layers."""
    del target  # without shardings, arguments are for one device of any machine

    def layer(x: Any, w: Any) -> Any:
        return adam_tutorial.gelu(adam_tutorial.single_layer(x, w))

    if policy is not None:
        layer = jax.checkpoint(layer, policy=policy)

    @stowax.stow
    def loss(params: Any, inputs: Any) -> Any:
        x = inputs
        for i in range(1, 5):
            x = layer(x, params[f"w{i}"])
        squares = sum(jnp.sum(w**2) for w in jax.tree.leaves(params))
        return jnp.mean((x - inputs) ** 2) + 0.001 * squares

    def step(params: Any, moments: Any, inputs: Any) -> Any:
        grads = jax.grad(loss)(params, inputs)
        updates, moments = adam_tutorial.optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments

    return step, adam_tutorial.arguments()


def _placed(target: Any, specs: Any, kind: str) -> Any:
    """`specs` in one kind of memory of one device; scalars always on the device."""

    def place(spec: Any) -> Any:
        memory = kind if spec.ndim else "device"
        return spec.update(sharding=target.sharding(memory_kind=memory))

    return jax.tree.map(place, specs)


def _adam_by_hand(target: Any) -> Made:
    """The page's own recipe: optimizer state in host memory."""
    params, moments, inputs = adam_tutorial.arguments()
    specs = (
        _placed(target, params, "device"),
        _placed(target, moments, "pinned_host"),
        _placed(target, inputs, "device"),
    )
    out = jax.tree.map(lambda spec: spec.sharding, specs[:2])
    step = adam_tutorial.offloaded_step
    return jax.jit(step, donate_argnums=0, out_shardings=out), specs


def _layers_by_hand(target: Any) -> Made:
    """The page's own recipe: weights in host memory, layer inputs offloaded."""
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[tutorial_layers.NAME],
        offload_src="device",
        offload_dst="pinned_host",
    )
    weights, x = tutorial_layers.arguments()
    specs = _placed(target, weights, "pinned_host"), _placed(target, x, "device")
    step = tutorial_layers.make_step(policy, tutorial_layers.hybrid_layer)
    return jax.jit(step), specs


def _targets(text: str) -> dict[str, dict[str, Any]]:
    """Of `"v5p-8 32, h200 8 half"`: targets, each with its batch and its weights."""
    found: dict[str, dict[str, Any]] = {}
    for place, *sizes in map(str.split, text.split(", ")):
        found[place] = {**HALF} if "half" in sizes else {}
        if sizes:
            found[place]["batch"] = int(sizes[0])
    return found


WORKLOADS: dict[str, Workload] = {
    "llama2-7b": Workload(
        make=llama.llama2_7b,
        what="Llama2-7B, sequences of 2048 tokens, AdamW",
        targets=_targets("h200 8 half, v5p-8 32, v5e-16 32, v6e-8 32, h200x8 64"),
    ),
    "llama2-13b": Workload(
        make=llama.llama2_13b,
        what="Llama2-13B, sequences of 2048 tokens, AdamW",
        targets=_targets("v5p-8 32, v5e-16 16 half, v6e-8 16 half, h200x8 64"),
    ),
    "llama2-70b": Workload(
        make=llama.llama2_70b,
        what="Llama2-70B, sequences of 2048 tokens, AdamW",
        targets=_targets("v5p-16 32 half, v5p-8 16 half, h200x8 32 half"),
    ),
    "gemma2-2b": Workload(
        make=gemma2.gemma2_2b,
        what="Gemma2-2B, sequences of 4096 tokens, AdamW",
        targets=_targets("v5p-8 16, v5e-16 16, v6e-8 8, h200 2, h200x8 32"),
    ),
    "gemma2-9b": Workload(
        make=gemma2.gemma2_9b,
        what="Gemma2-9B, sequences of 4096 tokens, AdamW",
        targets=_targets("v5p-8 8, v5e-16 16 half, v6e-8 8 half, h200x8 16"),
    ),
    "gemma2-27b": Workload(
        make=gemma2.gemma2_27b,
        what="Gemma2-27B, sequences of 4096 tokens, AdamW",
        targets=_targets("v5p-8 8 half, h200x8 16"),
    ),
    "paligemma2-3b": Workload(
        make=paligemma2.paligemma2_3b,
        what="PaliGemma2-3B, attention fine-tuned, 256 × (256 image + 256 text tokens)",
        targets=_targets("v5p-8, v6e-8, h200x8"),
    ),
    "paligemma2-10b": Workload(
        make=paligemma2.paligemma2_10b,
        what="PaliGemma2-10B, attention fine-tuned, 256 × (256 + 256 tokens)",
        targets=_targets("v5p-8, v6e-8, h200x8"),
    ),
    "paligemma2-28b": Workload(
        make=paligemma2.paligemma2_28b,
        what="PaliGemma2-28B, attention fine-tuned, 256 × (256 + 256 tokens)",
        targets=_targets("v5p-8, h200x8"),
    ),
    "mixtral-8x7b": Workload(
        make=mixtral.mixtral_8x7b,
        what="a mixture of experts like Mixtral 8x7B, sequences of 2048 tokens, AdamW",
        targets=_targets("v5p-16 16 half, h200x8 16 half"),
    ),
    "vit-g": Workload(
        make=vision.vit_g,
        what="ViT-g/14, images of 224 pixels, AdamW",
        targets=_targets("v5p-8 1024, v5e-16 1024, v6e-8 1024, h200 256, h200x8 2048"),
    ),
    "tutorial-layers": Workload(
        make=tutorial_layers.whole,
        what="the tutorial's ten layers (activations, parameters): gradients",
        layer_input=tutorial_layers.NAME,
        donated=(),
        targets=_targets("h200, v5p-8"),
        by_hand={"the tutorial's recipe": _layers_by_hand},
    ),
    "tutorial-adam": Workload(
        make=_adam,
        what="the tutorial's Adam step, four layers of 7168 × 7168",
        donated=(0, 1),
        targets=_targets("h200, v5p-8"),
        by_hand={"the tutorial's recipe": _adam_by_hand},
    ),
}


def made(name: str, target: Any, policy: Any = None) -> Made:
    """The step of a workload on `target`, and its specs."""
    workload = WORKLOADS[name]
    options = workload.targets.get(target.name, {})
    return workload.make(target, policy=policy, **options)
