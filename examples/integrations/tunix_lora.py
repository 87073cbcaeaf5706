"""Tunix's `PeftTrainer` on a small Llama with LoRA, as Tunix's guides write it.

Nothing but the marked line is stowax's, and `stowax run` does without it:

    python examples/integrations/tunix_lora.py
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import optax
import qwix
from common import compare, options
from flax import nnx
from tunix.models.llama3 import model as llama3
from tunix.sft import peft_trainer
from tunix.sft import utils as tunix_utils

import stowax

CONFIG = llama3.ModelConfig(
    num_layers=4,
    vocab_size=64,
    embed_dim=64,
    hidden_dim=256,
    num_heads=4,
    head_dim=16,
    num_kv_heads=2,
    rope_theta=10_000,
    norm_eps=1e-5,
)
BATCH, SEQUENCE = 16, 64


def make_model() -> nnx.Module:
    """A Llama whose attention and wide layers have low-rank additions."""
    base = llama3.Llama3(CONFIG, rngs=nnx.Rngs(0))
    lora = qwix.LoraProvider(
        module_path=".*q_proj|.*kv_proj|.*gate_proj|.*down_proj|.*up_proj",
        rank=8,
        alpha=16.0,
    )
    return qwix.apply_lora_to_model(
        base, lora, rngs=nnx.Rngs(1), **base.get_model_input()
    )


def batches(count: int) -> Iterator[peft_trainer.TrainingInput]:
    """Sequences that count."""
    draw = np.random.default_rng(0)
    for _ in range(count):
        start = draw.integers(CONFIG.vocab_size, size=(BATCH, 1))
        tokens = (start + np.arange(SEQUENCE)) % CONFIG.vocab_size
        yield peft_trainer.TrainingInput(
            input_tokens=tokens.astype(np.int32),
            input_mask=np.ones((BATCH, SEQUENCE), bool),
        )


def model_input(x: peft_trainer.TrainingInput) -> dict[str, Any]:
    """What the model is called with."""
    mask = x.input_tokens >= 0
    return {
        "input_tokens": x.input_tokens,
        "input_mask": x.input_mask,
        "positions": tunix_utils.build_positions_from_mask(mask),
        "attention_mask": tunix_utils.make_causal_attn_mask(mask),
    }


class Recorded(peft_trainer.PeftTrainer):
    """Tunix's trainer, which keeps the losses of its steps for the comparison below."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.losses: list[float] = []
        super().__init__(*args, **kwargs)

    def _buffer_metrics(self, buffer: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        if self._mode == "train":
            self.losses.append(float(loss))
        return super()._buffer_metrics(buffer, loss, *args, **kwargs)


def train(steps: int) -> list[float]:
    """Fine-tune for a few steps, with an evaluation in between; the losses."""
    trainer = Recorded(
        make_model(),
        optax.adamw(3e-2),
        peft_trainer.TrainingConfig(eval_every_n_steps=5, max_steps=steps),
    ).with_gen_model_input_fn(model_input)
    trainer.train(batches(steps), list(batches(1)))
    return trainer.losses


def main() -> None:
    """Train twice and compare."""
    asked = options()
    plain = train(asked.steps)

    # The one line. `stowax run --budget 60%` does without it.
    with stowax.planning(budget=asked.budget, target=asked.target) as session:
        planned = train(asked.steps)
    compare([*session.plans.values()], plain, planned)


if __name__ == "__main__":
    main()
