"""Plans and inspections made by hand, as the tests of what is printed need them."""

import dataclasses

from plan_parts import changed
from stowax._records._inspection import Hazard, Inspection, Memory, MemoryUse
from stowax._records._plan import (
    ArgumentRecord,
    Baseline,
    DecisionRecord,
    PinPrice,
    PlanRecord,
    ProgramRecord,
    ProofRecord,
    SearchRecord,
    StackRecord,
    Streaming,
    Trial,
)
from stowax._records._program import Transfer
from stowax._records._stages import Options
from stowax._records._timeline import Timeline, Unpriced

GIB = 2**30
MIB = 2**20


def decision(name, kind, mib, *, source="", reason="", value=0, **fields):
    """A value of the stack `layers`, 32 layers, `mib` MiB per layer."""
    fields = {"stack": "layers", "role": "activation", "count": 32, **fields}
    return DecisionRecord(
        value=value,
        name=name,
        source=source,
        shape=(mib, 1024, 256),
        dtype="float32",
        bytes=mib * MIB,
        decision=kind,
        reason=reason,
        **fields,
    )


STACK = StackRecord(
    name="layers",
    source="/home/me/train/model.py:88",
    count=32,
    unrolled=False,
    fingerprint="f",
    forward_seconds=0.0501,
    backward_seconds=0.1002,
    forward_window_used=0.41,
    backward_window_used=0.2,
)

DECISIONS = (
    decision(
        "attention output",
        "offload",
        160,
        source="/home/me/train/model.py:41",
        reason="hidden behind the layer's own work; computing it again takes 3.1 ms",
    ),
    decision("log-sum-exp", "keep", 2, source="/home/me/train/model.py:41", value=1),
    decision(
        "dot_general model.py:52 in layer",
        "recompute",
        448,
        source="/home/me/train/model.py:52",
        reason="2.0 ms to compute again; neither memory nor the link has room",
        value=2,
    ),
    decision(
        "dot_general model.py:52 in layer",
        "recompute",
        448,
        source="/home/me/train/model.py:52",
        reason="2.0 ms to compute again; neither memory nor the link has room",
        value=3,
    ),
)

PLAN = PlanRecord(
    program=ProgramRecord(
        step="train_step",
        target="v5p-8",
        device_kind="TPU v5",
        compile_only=True,
        stacks=(STACK,),
        arguments=(
            ArgumentRecord(
                path="args[0]",
                shape=(4,),
                shard=(4,),
                dtype="float32",
                role="parameter",
            ),
        ),
        rewritten=True,
        donate_argnums=(0,),
        compiler_options={},
        options=Options(),
        streaming=Streaming(
            lean=False, late=True, gradients_on_host=False, least_bytes=2**20
        ),
        versions={"stowax": "0.1.0", "jax": "0.10.2"},
        taken_apart=False,
    ),
    decisions=DECISIONS,
    proof=ProofRecord(
        budget_bytes=64 * GIB,
        host_budget_bytes=80 * GIB,
        fits=True,
        device_bytes=60 * GIB,
        host_bytes=5 * GIB,
        step_seconds=6.35,
        exposed_seconds=0.11,
        notes=("The host link is taken to carry 15 GB/s.",),
    ),
    search=SearchRecord(
        outcome="optimal",
        predicted_device_bytes=61 * GIB,
        model_seconds=6.3,
        bound_seconds=6.25,
        gap=0.008,
        binding=("device memory", "forward window of layers"),
        seconds_per_gib=0.012,
        smallest_budget=43 * GIB,
        smallest_budget_is="predicted",
        baselines=(
            Baseline(
                name="keep all",
                device_bytes=142 * GIB,
                host_bytes=0,
                seconds=6.1,
                fits=False,
            ),
            Baseline(
                name="recompute all",
                device_bytes=55 * GIB,
                host_bytes=0,
                seconds=7.2,
                fits=True,
            ),
        ),
        trials=(
            Trial(
                what="plan 1",
                predicted_bytes=55 * GIB,
                compiled_bytes=66 * GIB,
                host_bytes=5 * GIB,
                step_seconds=6.2,
                seconds_to_compile=21.0,
            ),
            Trial(
                what="plan 2",
                predicted_bytes=61 * GIB,
                compiled_bytes=60 * GIB,
                host_bytes=5 * GIB,
                step_seconds=6.35,
                seconds_to_compile=20.0,
            ),
        ),
        written=Trial(
            what="as written",
            predicted_bytes=140 * GIB,
            compiled_bytes=141 * GIB,
            host_bytes=0,
            step_seconds=5.0,
            seconds_to_compile=30.0,
        ),
        written_predicted_bytes=0,
        written_model_seconds=0.0,
        pins=(
            PinPrice(pattern="*norm*", decision="keep", matched=2, seconds=0.031),
            PinPrice(pattern="*gate*", decision="keep", matched=1, seconds=0.0),
        ),
        forbid=(),
        unpriced=("custom_call flash_attention",),
        planning_seconds=50.0,
        solving_seconds=0.5,
    ),
)

INFEASIBLE = changed(
    PLAN,
    outcome="infeasible",
    fits=False,
    budget_bytes=16 * GIB,
    step_seconds=0.0,
    in_the_way=(
        "parameters and optimizer state: 38.2 GiB",
        "gradients: 4.1 GiB",
    ),
    pins=(),
    baselines=tuple(dataclasses.replace(b, fits=False) for b in PLAN.search.baselines),
)

UNNEEDED = changed(
    PLAN,
    outcome="unneeded",
    budget_bytes=95 * GIB,
    host_bytes=0,
    decisions=tuple(dataclasses.replace(d, decision="keep") for d in DECISIONS),
    exposed_seconds=0.0,
    gap=0.0,
    binding=(),
    pins=(),
    unpriced=(),
    notes=(),
    trials=PLAN.search.trials[1:],
)


def many(count):
    """A plan that decides on `count` different values of two stacks."""
    kinds = ("offload", "recompute", "keep")
    values = tuple(
        decision(
            f"dot_general[{i}] transformer_layers.py:{i} in a_block_with_a_long_name",
            kinds[i % 3],
            count - i,
            source=f"/home/me/transformer_layers.py:{i}",
            reason="a reason that is longer than the room that there is for it " * 2,
            value=i,
            stack=("layers", "decoder")[i % 2],
        )
        for i in range(count)
    )
    stacks = (STACK, dataclasses.replace(STACK, name="decoder", unrolled=True))
    policies = tuple(
        Baseline(
            name=f"save_dot_with_context_except_mlp_{i}",
            device_bytes=1023 * GIB,
            host_bytes=1023 * GIB,
            seconds=123.45,
            fits=bool(i % 2),
        )
        for i in range(12)
    )
    return changed(PLAN, decisions=values, stacks=stacks, baselines=policies)


def transfer(direction, mib, trips, *, line=41, asynchronous=True, name="copy-start.1"):
    """A copy of `mib` MiB, `trips` times per step."""
    return Transfer(
        direction=direction,
        bytes=mib * MIB,
        trips=trips,
        asynchronous=asynchronous,
        start=name,
        done=name.replace("start", "done"),
        computation="body",
        op_name="jit(train_step)/while/body/stowax.offload.layers.12",
        source=f"/home/me/train/model.py:{line}",
    )


INSPECTION = Inspection(
    target="v5p-8",
    program="jit_train_step",
    memory=Memory(
        device=MemoryUse(
            argument=30 * GIB, output=29 * GIB, alias=29 * GIB, temp=30 * GIB
        ),
        host=MemoryUse(argument=0, output=0, alias=0, temp=5 * GIB),
    ),
    transfers=(
        transfer("device-to-host", 160, 31),
        transfer("host-to-device", 160, 31, name="copy-start.2"),
        transfer("host-to-device", 8, 1, asynchronous=False, name="copy.9", line=52),
    ),
    hazards=(
        Hazard(
            kind="host-compute",
            what="Arithmetic runs on the host's processor.",
            where="/home/me/train/model.py:52 (jit(train_step)/dot_general)",
            cost="1.2 GFLOP of matrix products, 3.0 GiB read and written on the host",
            remedy="Bring the operands to the device before the arithmetic.",
            instruction="call.3",
            count=32,
            seconds=0.5,
        ),
    ),
    timeline=Timeline(
        origin="simulated",
        step_seconds=6.35,
        compute_seconds=6.13,
        exposed_seconds=0.11,
        collective_wait_seconds=0.11,
        device_to_host_seconds=0.35,
        host_to_device_seconds=0.36,
        collective_seconds=1.2,
        intervals=(),
        unpriced=(
            Unpriced(
                what="custom-call tpu_custom_call",
                reason="no estimate in the program",
                count=64,
                seconds=0.031,
            ),
        ),
        assumptions=("The link carries both directions at full rate at once.",),
    ),
    flops=2.5e15,
)
