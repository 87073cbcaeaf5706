"""The models that tests, demo and benchmarks plan for.

Each is an ordinary training script: a model, a loss with the one mark that stowax asks
for, a step. Most have `small()`, which returns `(step, args)` with real arrays for
numerics on a CPU. Those that are planned for one chip have `medium()`, the same with
`jax.ShapeDtypeStruct`s of a size worth planning there, and `sized(config)` for other
sizes. Those of published sizes take a target.
"""

from types import ModuleType

from benchmarks.models import (
    encoder_decoder,
    equinox_loop,
    linen_scan,
    llama,
    loop_transformer,
    nnx_loop,
    scan_transformer,
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
