"""A Keras 3 language model: `compile` and `fit`, as Keras's guides write it.

Nothing here is stowax's. To train within 60 % of the memory that the step takes:

    python -m stowax run --budget 60% examples/integrations/keras_lm.py
"""

import argparse
import os
import tempfile

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np
from keras import layers

LAYERS, WIDTH, HEADS, VOCABULARY, SEQUENCE, BATCH = 4, 64, 4, 64, 64, 16


def block(x: keras.KerasTensor) -> keras.KerasTensor:
    """Attention and a wide layer, each with a residual."""
    y = layers.LayerNormalization()(x)
    y = layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(y, y, use_causal_mask=True)
    x = x + layers.Dropout(0.1)(y)
    y = layers.LayerNormalization()(x)
    y = layers.Dense(4 * WIDTH, activation="gelu")(y)
    return x + layers.Dense(WIDTH)(y)


def make_model() -> keras.Model:
    """A small GPT."""
    tokens = keras.Input((SEQUENCE,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH)(tokens)
    for _ in range(LAYERS):
        x = block(x)
    return keras.Model(tokens, layers.Dense(VOCABULARY)(layers.LayerNormalization()(x)))


def batches(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Sequences that count, and what comes next in them."""
    start = np.random.default_rng(0).integers(VOCABULARY, size=(count * BATCH, 1))
    tokens = (start + np.arange(SEQUENCE + 1)) % VOCABULARY
    return tokens[:, :-1].astype(np.int32), tokens[:, 1:].astype(np.int32)


def train(epochs: int = 2, steps: int = 5) -> dict[str, list[float]]:
    """Compile, fit with validation and a checkpoint, evaluate, predict."""
    keras.utils.set_random_seed(0)
    model = make_model()
    model.compile(
        optimizer=keras.optimizers.AdamW(1e-3, weight_decay=0.01),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    x, y = batches(steps)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/best.weights.h5"
        best = keras.callbacks.ModelCheckpoint(
            path, save_weights_only=True, save_best_only=True, monitor="val_loss"
        )
        history = model.fit(
            x,
            y,
            batch_size=BATCH,
            epochs=epochs,
            shuffle=False,
            verbose=2,
            validation_data=(x[:BATCH], y[:BATCH]),
            callbacks=[best],
        ).history
        again = model.evaluate(x[:BATCH], y[:BATCH], batch_size=BATCH, verbose=0)
        restored = make_model()
        restored.load_weights(path)
        np.testing.assert_allclose(
            restored.predict(x[:4], verbose=0),
            model.predict(x[:4], verbose=0),
            rtol=1e-4,
            atol=1e-4,
        )
    np.testing.assert_allclose(again[0], history["val_loss"][-1], rtol=1e-4)
    return history


def main() -> None:
    """Train, and print the losses of the epochs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    for name, values in train(parser.parse_args().epochs).items():
        print(f"{name:13}", *(f"{value:.6f}" for value in values))


if __name__ == "__main__":
    main()
