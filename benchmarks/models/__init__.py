"""The models that tests, demo and benchmarks plan for.

Each is an ordinary training script: a model, a loss with the one mark that stowax asks
for, a step. Most have `small()`, which returns `(step, args)` with real arrays for
numerics on a CPU. Those that are planned for one chip have `medium()`, the same with
`jax.ShapeDtypeStruct`s of a size worth planning there, and `sized(config)` for other
sizes. Those of published sizes take a target.

Those in `STRAIGHT` do not repeat. Each has `model(config)` and the sizes `SMALL` and
`LARGE`; `model(LARGE).sized(policy)` is a step under checkpoints by hand (`_blocks`).
"""

from types import ModuleType

from benchmarks.models import (
    big_vocabulary,
    densenet,
    detector,
    efficientnet,
    encoder_decoder,
    equinox_loop,
    graph_net,
    linen_scan,
    llama,
    loop_transformer,
    nnx_loop,
    resnet,
    scan_transformer,
    seq2seq,
    unet,
)

MODELS: dict[str, ModuleType] = {
    "scan_transformer": scan_transformer,
    "loop_transformer": loop_transformer,
    "nnx_loop": nnx_loop,
    "linen_scan": linen_scan,
    "equinox_loop": equinox_loop,
    "encoder_decoder": encoder_decoder,
    "llama": llama,
}

STRAIGHT: dict[str, ModuleType] = {
    "unet": unet,
    "resnet": resnet,
    "densenet": densenet,
    "efficientnet": efficientnet,
    "graph_net": graph_net,
    "seq2seq": seq2seq,
    "detector": detector,
    "big_vocabulary": big_vocabulary,
}
