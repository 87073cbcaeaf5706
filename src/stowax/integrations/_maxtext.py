"""A plan as MaxText's `remat_policy: custom`.

MaxText names the values of a layer with `checkpoint_name` and reads one key a name:
`remat`, `device` or `offload`. What a plan decides of values without such a name cannot
be written so; it stands in comments.
"""

import collections
from collections.abc import Iterable, Iterator, Sequence

from .._records._plan import DecisionRecord, PlanRecord

KEYS = (
    *("decoder_layer_input", "indexer_cutoff_threshold", "context"),
    *("mlpwi", "mlpwi_0", "mlpwi_1", "mlpwo"),
    *("moe_mlpwi_0", "moe_mlpwi_1", "moe_mlpwo", "moe_x_sorted", "moe_routing_maps"),
    *("query_proj", "key_proj", "value_proj", "kv_proj", "qkv_proj", "out_proj"),
    *("query_wa_proj", "kv_wa_proj", "mla_q", "mla_kv", "attention_out"),
)
"""What MaxText 0.2.5 reads where `remat_policy` is `custom` (`configs/types.py`)."""

_PLACES = {"keep": "device", "offload": "offload", "recompute": "remat"}
_SWITCHES = {
    "optimizer state": "optimizer_memory_host_offload",
    "parameter": "parameter_memory_host_offload",
}


def maxtext_remat(plan: PlanRecord) -> str:
    """A plan's decisions about activations, as lines of a MaxText configuration.

    A name has one place in all layers: where the plan treats layers differently, the
    decision with the most bytes is written, and a comment says so.

    **Arguments:** `plan` is one of MaxText's `train_step`; `stowax run -o plan.json`
    saves it.

    **Returns:** YAML for MaxText 0.2.5. Every key is written, so that none keeps the
    value of another policy.

    ```python
    from stowax.integrations import maxtext_remat

    print(maxtext_remat(stowax.load_plan("plan.json")))
    ```
    """
    step = plan.program.step
    stored = [d for d in plan.decisions if d.role == "activation"]
    by_name: dict[str, list[DecisionRecord]] = collections.defaultdict(list)
    for decision in stored:
        by_name[decision.name].append(decision)
    lines = [
        f"# {step} on {plan.target}, planned by stowax, in MaxText 0.2.5's names",
        "remat_policy: custom",
        *(_line(key, by_name[key]) for key in KEYS),
        *_state(plan.decisions),
        *_without_a_name(d for d in stored if d.name not in KEYS),
    ]
    return "\n".join(lines) + "\n"


def _line(key: str, decisions: Sequence[DecisionRecord]) -> str:
    counted: collections.Counter[str] = collections.Counter()
    for decision in decisions:
        counted[decision.decision] += decision.bytes * decision.count
    if not counted:  # MaxText's own way with what its model does not have
        return f"{key}: {'device' if key == 'decoder_layer_input' else 'remat'}"
    place = _PLACES[counted.most_common(1)[0][0]]
    note = "  # the plan decides differently layer by layer" if len(counted) > 1 else ""
    return f"{key}: {place}{note}"


def _state(decisions: Iterable[DecisionRecord]) -> Iterator[str]:
    gone = {d.role for d in decisions if d.decision == "offload"} & _SWITCHES.keys()
    for role in sorted(gone):
        yield f"# The plan has {role} in host memory and streams it through the step."
        yield "# MaxText's own switch moves all of it, at another cost:"
        yield f"# {_SWITCHES[role]}: true"


def _without_a_name(decisions: Iterable[DecisionRecord]) -> Iterator[str]:
    lost = [d for d in decisions if d.decision != "recompute"]
    if lost:
        yield "# Stored by the plan, and without a name in MaxText: recomputed here."
    for decision in lost:
        yield f"#   {decision.decision}: {' '.join(decision.name.split())}"
