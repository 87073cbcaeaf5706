"""The hand-written policies that plans are compared with.

JAX's own, and MaxText's by the names of its `remat_policy`. Each step is compiled once
per workload and target: what it takes does not depend on a budget, only whether it fits
does. XLA's own rematerialization is different: nothing is under `jax.checkpoint`, and
the compiler is told of a smaller chip.
"""

from collections.abc import Callable
from typing import Any

import jax

from benchmarks.models import _named
from stowax._survey._options import options_by_hand, plan_options

_TO_HOST = {"offload_src": "device", "offload_dst": "pinned_host"}
_QKV = ("query_proj", "key_proj", "value_proj")
_EVERY = (*_named.ATTENTION, *_named.FEED_FORWARD)
XLA = "XLA's own rematerialization"
PLAN = "stowax"
PIPELINED = ", XLA's pipeline"


def _offloaded(*names: str) -> Any:
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=list(names),
        **_TO_HOST,
    )


def policies(layer_input: str) -> dict[str, Callable[[], Any]]:
    """Name → policy; `layer_input` is what a layer's input is called."""
    known = jax.checkpoint_policies
    return {
        "everything_saveable": lambda: known.everything_saveable,
        "nothing_saveable": lambda: known.nothing_saveable,
        "dots_saveable": lambda: known.dots_saveable,
        "dots_with_no_batch_dims_saveable": (
            lambda: known.dots_with_no_batch_dims_saveable
        ),
        "offload_dot_with_no_batch_dims": (
            lambda: known.offload_dot_with_no_batch_dims(**_TO_HOST)
        ),
        "minimal": lambda: known.save_only_these_names(*_EVERY),
        "save_qkv_proj": lambda: known.save_only_these_names(*_QKV),
        "qkv_proj_offloaded": lambda: _offloaded(*_QKV),
        "minimal_offloaded": lambda: _offloaded(*_EVERY),
        "layer input offloaded": lambda: _offloaded(layer_input),
    }


def names(layer_input: str, target: Any) -> list[str]:
    """Every policy on `target`, in order.

    One that offloads is compiled in two ways for a TPU, see `options_for`.
    """
    known = list(policies(layer_input))
    if target.platform != "tpu":
        return known
    return known + [name + PIPELINED for name in known if "offload" in name]


def options_for(name: str, target: Any) -> dict[str, Any]:
    """Compiler options of a policy: those that a plan would get that does the same.

    A plan for a TPU lays out its own pipeline of copies, and has XLA's turned off. What
    that does to a scan under a policy depends: so there is one with it, too.
    """
    options = plan_options(target, "offload" in name or "recipe" in name)
    return options_by_hand(options) if name.endswith(PIPELINED) else options
