"""What a plan's table and its folded lines would say twice, or wrong."""

import dataclasses

from plan_parts import changed
from report_records import PLAN, decision
from stowax.report import plan_text


def test_policies_with_the_same_figures_share_a_row():
    """Without a host to offload to, one that offloads is one that recomputes."""
    keep, recompute = PLAN.search.baselines
    alike = dataclasses.replace(recompute, name="offload layer inputs")
    text = plan_text(changed(PLAN, baselines=(keep, recompute, alike)), 80)
    assert "  recompute all  " in text
    assert "offload layer inputs" not in text
    other = dataclasses.replace(alike, host_bytes=1)
    text = plan_text(changed(PLAN, baselines=(keep, recompute, other)), 80)
    assert "  offload layer inputs  " in text


def test_what_is_folded_is_called_smaller_only_where_it_is():
    def folded(sizes):
        values = [
            decision(f"value {k}", "recompute", size, value=k, reason="because " * 30)
            for k, size in enumerate(sizes)
        ]
        lines = plan_text(changed(PLAN, decisions=tuple(values)), 80).splitlines()
        return next(line for line in lines if line.lstrip().startswith("and "))

    assert " smaller values: " in folded(range(30, 0, -1))
    assert " more values: " in folded([64] * 30)


def test_no_more_is_promised_of_memory_than_keeping_all_saves():
    keep, recompute = PLAN.search.baselines
    assert "1 GiB more  would save about 12.0 ms" in plan_text(PLAN, 80)
    near = dataclasses.replace(keep, seconds=PLAN.search.model_seconds - 0.011)
    text = plan_text(changed(PLAN, baselines=(near, recompute)), 80)
    assert "1 GiB more" not in text
