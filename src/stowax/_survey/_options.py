"""Compiler options that belong to a plan, per platform, each with its evidence.

A plan that copies between device and host needs a scheduler that starts copies early,
and a plan for TPUs products that stay what they are. Else nothing is set, and nothing
for a step that stays as it is.

Tried and left out: telling the scheduler of a budget below the chip's memory, for a
plan that offloads. On TPU `xla_tpu_scheduler_percent_shared_memory_limit` changed
nothing; on GPU `xla_gpu_memory_limit_slop_factor` made XLA rematerialize and offload by
itself, with synchronous copies (0.068 s a step became 0.230 s) and no less memory.
"""

from collections.abc import Mapping
from typing import Any

from .._target._machine import Target
from .._target._specs import any_sharded

# TPU. Measured on Llama2-13B, v5p, 15 GB/s: the pipelined scan alone takes 8.80 s a
# step, with the first three 6.35 s; full recomputation takes 7.16 s. The fourth is on
# by default: XLA then peels an iteration off the backward loop and lays kept stacks
# out anew for it. The train step at 90 GiB, with it and without: 6.63 and 6.35 s a
# step, 113 and 104 GiB.
_TPU_OVERLAP: dict[str, str | bool | float] = {
    "xla_lhs_prioritize_async_depth_over_stall": "ENABLED",
    "xla_tpu_host_transfer_overlap_limit": "24",
    "xla_tpu_enable_all_experimental_scheduler_features": True,
    "xla_tpu_pipeline_memory_host_transfers": False,
}

# TPU. XLA makes one fusion of two products where the first is only read by the second:
# values into the attention took 9.4 ms a layer, and 1.4 ms as two (Llama2-7B on eight
# v6e). Full recomputation by the compiled schedules, seconds a step with such fusions
# and without: 1.691 and 1.431 there, on v5p PaliGemma2-3B 1.779 and 1.695, 10B 6.449
# and 6.411, 28B 17.505 and 17.309, Llama2-70B 15.00 and 15.14; four others have none.
_TPU_ALWAYS = {"xla_tpu_dot_dot_fusion": False}

# XLA makes loops of products whose operand is spread over eight TPUs or more, and
# passes pieces on meanwhile. Each is slower than the product, its result is cleared
# first and copied after, and where a product is kept the one of the backward pass
# becomes such a loop, too: what was kept costs more than it saves. Seconds a step with
# such loops and without: Llama2-7B on v6e 1.969 and 1.481, recomputing all 1.923 and
# 1.691; Llama2-70B on v5p 15.09 and 14.57, recomputing all 16.65 and 15.00. Programs
# are smaller, too: 32.3 and 30.7 GiB, predicted 30.7. Four chips had none.
_TPU_GATHERED = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}
_MANY_CHIPS = 8

# GPU. The first lets copies overlap at all. The second keeps XLA's rematerialization
# from counting pinned host buffers as device memory (openxla/xla 34565 and others:
# hundreds of needless recomputations). The third is off because with it offloaded scan
# residuals are read in the wrong order on jaxlib 0.11.0 (openxla/xla 46231): wrong
# gradients.
_GPU_OVERLAP = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_enable_host_memory_offloading": True,
    "xla_gpu_enable_dynamic_slice_fusion": False,
    # The pass counts host memory, too, finds that the program does not fit, and starts
    # to recompute and to offload by itself, with copies that are waited for: Llama2-13B
    # with 137 GiB of its state on the host took 14.5 s a step on an H200, and 6.3
    # without the pass, by the compiled schedules. What is recomputed, the plan decides.
    "xla_disable_hlo_passes": "rematerialization",
}

# XLA has two copies under way by default, and waits for one of them where a third could
# begin, the link at rest (openxla/xla 33269 made that a setting, for offloading). What
# is under way takes memory, up to 2 GiB in the programs below, so plans that need the
# least do without. Seconds a step on an H200 with a limit of 2, 4, 8 and 16, at one set
# of decisions each: Llama2-7B 1.971 1.915 1.893 1.893, 1.970 1.914 1.775 1.775, 2.427
# 2.062 1.887 1.877, 2.049 2.023 1.971 1.893; a mixture of experts on eight of them
# 2.355 2.252 2.109 1.995.
_GPU_COPIES = {"xla_gpu_experimental_parallel_async_compute_limit": "16"}


def plan_options(
    target: Target, offloads: bool, *, sparing: bool = False
) -> dict[str, str | bool | float]:
    """Options for a plan, by whether it offloads; `sparing` puts memory before time."""
    overlap = overlap_options(target) if offloads else {}
    if target.platform == "gpu" and offloads and not sparing:
        return {**overlap, **_GPU_COPIES}
    if target.platform != "tpu":
        return overlap
    many = target.device_count >= _MANY_CHIPS
    return {**overlap, **_TPU_ALWAYS, **(_TPU_GATHERED if many else {})}


# XLA's own pipeline of copies: off in a plan, which lays out its own. A scan under a
# policy is mostly better off with it. Seconds a step on a v5p-8 without and with it; Q,
# K and V offloaded by hand: PaliGemma2-3B 2.126 and 1.687, 10B 7.395 and 6.367, 28B
# 17.815 and 17.033, Llama2-13B 6.903 and 7.152; layer inputs: 28B 18.566 and 17.806,
# Llama2-13B 6.729 and 6.576. What public recipes set besides (MaxText's for offloading)
# changed nothing.
_OWN_PIPELINE = "xla_tpu_pipeline_memory_host_transfers"


def options_by_hand(options: Mapping[str, Any]) -> dict[str, Any]:
    """A plan's options, for a step that does the same by a policy instead."""
    return {name: value for name, value in options.items() if name != _OWN_PIPELINE}


def overlap_options(target: Target) -> dict[str, str | bool | float]:
    """Options for a plan that offloads."""
    if target.platform == "tpu":
        return dict(_TPU_OVERLAP)
    if target.platform == "gpu":
        return dict(_GPU_OVERLAP)
    return {}


# What `plan(..., compiles=...)` tries, one at a time, when nothing else is left; a
# change stays only where the compiled schedule of this very plan is faster with it. On
# TPUs each was seen to help one plan and to harm another. Seconds a step on v5p at 15
# GB/s, as it is → with the change: two plans for PaliGemma2-28B, one for Llama2-13B.
_TPU_ALTERNATIVES: tuple[dict[str, str | bool | float], ...] = (
    # A slow link, by the scheduler's book: copies start early. 20.96 → 15.96,
    # 14.47 → 14.93, 5.93 → 5.93. (Public recipes for training have 0.03.)
    {"xla_tpu_pcie_bandwidth_multiplier": "0.05"},
    # 20.96 → 16.92, 14.47 → 14.45, 5.93 → 6.22.
    {"xla_tpu_host_transfer_overlap_limit": "2"},
    # With the first of these: 15.96 → 16.44, and 3 GiB less.
    {"xla_tpu_enable_all_experimental_scheduler_features": False},
)
# No evidence beforehand for the last. Many copies under way (`_GPU_COPIES`) may stand
# in line before the one that is needed first: ten layers of 256 MiB whose weights
# stream take 343 ms with two on an H200, and 369 with sixteen.
_GPU_ALTERNATIVES: tuple[dict[str, str | bool | float], ...] = (
    {"xla_gpu_experimental_parallel_async_compute_limit": "2"},
    {"xla_gpu_experimental_parallel_async_compute_limit": "8"},
    {"xla_gpu_enable_latency_hiding_scheduler": False},
)


def alternatives(
    target: Target, options: Mapping[str, str | bool | float]
) -> tuple[dict[str, str | bool | float], ...]:
    """`options` with one of them changed, for each change that is worth a try.

    None for a plan that moves nothing. What keeps gradients right or programs small is
    never touched.
    """
    if not options.keys() >= overlap_options(target).keys():
        return ()
    lists = {"tpu": _TPU_ALTERNATIVES, "gpu": _GPU_ALTERNATIVES}
    return tuple(
        {**options, **change}
        for change in lists.get(target.platform, ())
        if all(options.get(name) != value for name, value in change.items())
    )


# TPU, whether or not anything moves: what a kernel may hold of the chip's fast memory,
# in KiB: what libtpu gives it by itself, and twice that. Products then read their
# operands less often. Seconds a step with the first and the second: on v5p-8 full
# recomputation of Llama2-13B 6.575 and 5.573, of PaliGemma2-3B 1.695 and 1.402, and
# with everything kept 1.339 and 1.082; Llama2-7B recomputed on eight v6e 1.431 and
# 1.270, on sixteen v5e 2.447 and 2.173. Device memory is the same, a compile takes 1.6
# to 2.3 times as long. Twice as much again takes 2 to 3 % more off steps on v5p, for
# five times the compile. A v4 compiles to the same program with any of them.
_FAST_MEMORY: dict[str, tuple[int, int]] = {
    "v5e": (16384, 32768),
    "v5p": (16384, 32768),
    "v6e": (32768, 65536),
}
FAST_MEMORY = "xla_tpu_scoped_vmem_limit_kib"
"""The option's name."""


def fast_memory_kib(target: Target) -> tuple[int, int] | None:
    """What a TPU's kernels may hold of its fast memory: by default, and what is better.

    `None` for chips of which it is not known that more is better.
    """
    return _FAST_MEMORY.get(target.chip.key) if target.platform == "tpu" else None


def more_fast_memory(target: Target) -> dict[str, str | bool | float]:
    """Options that let a kernel have more of a TPU's fast memory; else none."""
    known = fast_memory_kib(target)
    return {FAST_MEMORY: str(known[1])} if known else {}


def is_own_option(name: str, value: Any) -> bool:
    """Whether a plan may have this option without anybody else's wish."""
    tables = (_TPU_OVERLAP, _TPU_ALWAYS, _TPU_GATHERED, _GPU_OVERLAP, _GPU_COPIES)
    alternatives = (*_TPU_ALTERNATIVES, *_GPU_ALTERNATIVES)
    if any(table.get(name) == value for table in (*tables, *alternatives)):
        return True
    return name == FAST_MEMORY and value in {str(v[1]) for v in _FAST_MEMORY.values()}


def wants_row_major(target: Target, specs: Any = ()) -> bool:
    """Whether stored values are to lie in memory as their shapes say.

    On a GPU the compiler otherwise transposed whole stacks between the forward and the
    backward loop: a transformer that keeps its attention weights (8 GiB) took 34.5 GiB
    instead of 28.4 on an H200, and a longer step. A TPU's compiler lays both loops out
    alike, in an order that wastes no padding, which this would undo.

    Not where `specs`, the step's arguments, are spread over several devices: there the
    layout gathers the values of all devices, in every layer (a step of 16 layers on
    eight GPUs: 18.5 ms instead of 9.5, by its compiled schedule).
    """
    return target.platform == "gpu" and not any_sharded(specs)


def wants_early_gradients(target: Target, specs: Any = ()) -> bool:
    """Whether it can save memory to compute layers' gradients where they arise.

    A TPU's compiler minds memory itself, and fuses what reads a product into it. Where
    `specs` are spread over several devices, such a gradient is a sum over devices, and
    the backward pass would wait for it.
    """
    return target.platform == "gpu" and not any_sharded(specs)
