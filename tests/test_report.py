"""What the terminal shows: character by character at 80 columns, by rule at others."""

import dataclasses

import pytest

from plan_parts import changed
from report_records import (
    DECISIONS,
    GIB,
    INFEASIBLE,
    INSPECTION,
    MIB,
    PLAN,
    UNNEEDED,
    decision,
    many,
    transfer,
)
from stowax._target._target import targets_table
from stowax.report import inspection_text, plan_text, target_text, targets_text

WIDTHS = (60, 80, 100, 160)
PLANS = {
    "optimal": PLAN,
    "infeasible": INFEASIBLE,
    "unneeded": UNNEEDED,
    "many": many(40),
    "none": changed(PLAN, decisions=(), stacks=(), baselines=()),
}


def test_plan_at_80_columns():
    assert plan_text(PLAN, 80) == (
        """\
stowax plan for train_step on v5p-8 (compile-only)
FITS: 60.0 GiB of 64.0 GiB per device (94%), optimal under the model.
As written it compiles to 141.0 GiB; the plan takes 27.0% longer.
'recompute all', the fastest hand-written policy that fits, is predicted to take
14.3% longer.

  per device               device      host  step time  vs predicted  fits
▸ this plan, compiled    60.0 GiB  5.00 GiB     6.35 s                yes
  as written, compiled  141.0 GiB         –     5.00 s                no
▸ this plan, predicted   61.0 GiB  5.00 GiB     6.30 s                yes
  recompute all          55.0 GiB         –     7.20 s        +14.3%  yes
  keep all              142.0 GiB         –     6.10 s         -3.2%  no
  step time: compiled is simulated from XLA's schedule, all others the model's;
  policies, keep all too, run layers as the plan does, not as written

model.py:88: 32 layers (scan)
  forward 50.1 ms a layer (copies fill 41%), backward 100.2 ms (copies fill 20%)
  recompute  28.0 GiB  64 ×  dot_general model.py:52 in layer
                               each: 2.0 ms to compute again; neither memory
                               nor the link has room
  offload    5.00 GiB  32 ×  attention output (model.py:41)
                               hidden behind the layer's own work; computing
                               it again takes 3.1 ms
  keep       64.0 MiB  32 ×  log-sum-exp (model.py:41)

step time   6.35 s simulated from the compiled schedule, 110.0 ms of it waiting
            for host copies
bound       no plan is predicted below 6.25 s (this one: 6.30 s; gap 0.80%)
limited by  device memory, forward window of model.py:88
1 GiB more  would save about 12.0 ms of each step
least       about 43.0 GiB, predicted: the smallest budget with these pins
pin         '*norm*' to keep (2 values): costs 31.0 ms per step
pin         '*gate*' to keep (1 value): costs nothing
not priced  custom_call flash_attention
note        The host link is taken to carry 15 GB/s.
donated     argument 0
compiled    2 programs in 41.00 s: 66.0 GiB → 60.0 GiB (first guess 55.0 GiB);
            planned in 50.00 s"""
    )


def test_memory_left_free_is_explained():
    roomy = changed(PLAN, binding=(), budget_bytes=100 * 2**30)
    text = plan_text(roomy, 80)
    assert "left free   40.0 GiB: storing more would take longer than" in text
    assert "left free" not in plan_text(PLAN, 80)
    # Nothing proves it of a plan that is not optimal, or that has all in place.
    for other in (
        {"outcome": "feasible"},
        {"decisions": UNNEEDED.decisions},
    ):
        assert "left free" not in plan_text(changed(roomy, **other), 80)


def test_the_smallest_budget_is_compiled_or_predicted_and_of_these_wishes():
    how = {"smallest_budget_is": "compiled", "forbid": ("offload",)}
    text = plan_text(changed(INFEASIBLE, **how), 80)
    assert "it takes    43.0 GiB: the smallest budget with these forbids" in text
    assert "that the pins and forbids allow" in " ".join(text.split())


def test_infeasible_plan_says_what_would_work():
    text = plan_text(INFEASIBLE, 80)
    assert text.splitlines()[1].startswith("DOES NOT FIT 16.0 GiB per device")
    assert "it takes    about 43.0 GiB, predicted: the smallest budget" in text
    assert (
        "in the way  parameters and optimizer state: 38.2 GiB\n"
        "            gradients: 4.1 GiB" in text
    )
    assert "1 GiB more" not in text
    assert "hand-written" not in text  # nothing is praised that does not fit
    assert "no plan is known to fit. Of what was compiled," in " ".join(text.split())


def test_infeasible_for_the_users_pins_does_not_blame_everything():
    """Nor is more claimed than was tried: a policy may be predicted to need less."""
    for wishes in ({"pins": PLAN.pins}, {"forbid": ("offload",)}):
        text = " ".join(plan_text(changed(INFEASIBLE, **wishes), 80).split())
        assert "no plan that the pins and forbids allow is known to fit." in text


def test_unneeded_plan_moves_nothing():
    lines = plan_text(UNNEEDED, 80).splitlines()
    assert lines[1] == "FITS as it is: 60.0 GiB of 95.0 GiB per device. Nothing moves."
    assert (
        "All 4 values that the backward pass reads stay on the device (33.1 GiB)."
        in lines
    )
    assert not any("bound" in line or "limited" in line for line in lines)
    # Policies store every residual themselves: their "keep all" is another program.
    assert not any("keep all" in line or "vs predicted" in line for line in lines)


def test_plan_that_compiled_too_large_does_not_claim_to_fit():
    over = changed(PLAN, fits=False, device_bytes=66 * GIB)
    text = plan_text(over, 80)
    assert "DOES NOT FIT: compiled 66.0 GiB per device, budget 64.0 GiB." in text
    assert (
        "▸ this plan, compiled    66.0 GiB  5.00 GiB     6.35 s                no"
        in text
    )


def test_slower_than_a_baseline_is_said():
    slow = changed(PLAN, model_seconds=7.92)
    text = plan_text(slow, 80)
    assert "is predicted to take\n9.1% less time." in text
    assert (
        "  recompute all          55.0 GiB         –     7.20 s         -9.1%" in text
    )


def test_alike_values_are_one_line_and_pins_are_named():
    twice = (
        decision("norm", "keep", 64, source="/a/model.py:9", pinned="*norm*", value=1),
        decision("norm", "keep", 64, source="/b/model.py:9", pinned="*norm*", value=2),
        decision("norm", "keep", 64, source="/a/model.py:9", value=3),
        decision("gate", "offload", 1, value=4),
    )
    lines = plan_text(changed(PLAN, decisions=twice), 160).splitlines()
    # 2 values of 64 MiB in 32 layers are 4 GiB; the third has another file.
    assert "  keep     4.00 GiB  64 ×  norm (model.py:9)  pinned by '*norm*'" in lines
    assert "  keep     2.00 GiB  32 ×  norm (model.py:9)  pinned by '*norm*'" in lines


def test_small_values_fold_with_their_totals():
    record = changed(many(40), baselines=())
    text = plan_text(record, 80)
    folds = [line for line in text.splitlines() if "smaller values: " in line]
    assert len(folds) == len(record.program.stacks)
    for i, (stack, fold) in enumerate(
        zip(record.program.stacks, folds, strict=True), start=1
    ):
        number = sum(d.stack == stack.name for d in record.decisions)
        block_of_it = text.split(f"model.py:88 #{i}: 32 layers")[1].split("\n\n")[0]
        shown = block_of_it.count(" 32 × ")
        assert f"and {number - shown} smaller values: " in fold


def test_values_of_different_counts_fold_into_whole_numbers():
    uneven = tuple(
        dataclasses.replace(made, count=1 + i % 3)
        for i, made in enumerate(many(40).decisions)
    )
    record = changed(many(40), decisions=uneven, baselines=())
    text = plan_text(record, 80)
    folds = [line for line in text.splitlines() if "smaller values: " in line]
    assert folds
    for fold in folds:
        assert "." not in fold.split("smaller values")[0]


def test_what_is_offloaded_is_not_folded_away():
    large = [
        decision(f"dot {i}", "recompute", 100 + i, reason="because", value=i)
        for i in range(30)
    ]
    small = decision("attention output", "offload", 1, reason="hidden", value=30)
    kept = decision("statistics", "keep", 2, value=31)
    record = changed(PLAN, decisions=(*large, small, kept))
    text = plan_text(record, 80)
    assert "  offload    32.0 MiB  32 ×  attention output" in text
    assert "  keep       64.0 MiB  32 ×  statistics" in text
    assert text.index("dot 29") < text.index("statistics")  # largest first


def test_prices_are_of_a_unit_that_is_small_beside_the_budget():
    small = changed(
        PLAN,
        budget_bytes=32 * MIB,
        seconds_per_gib=0.1024,
        model_seconds=0.9,
        baselines=(),
    )
    assert "1 MiB more  would save about 100.0 µs of each step" in plan_text(small, 80)
    # A price that is lost beside the step is not worth a line.
    large = changed(small, model_seconds=1.1)
    assert "1 MiB more" not in plan_text(large, 80)
    toy = changed(small, budget_bytes=2 * MIB, model_seconds=1e-3)
    assert "64 KiB more  would save about 6.2 µs of each step" in plan_text(toy, 80)


def test_brackets_in_names_survive():
    values = (decision("split[0] of [bold]", "offload", 8), DECISIONS[1])
    record = changed(PLAN, decisions=values)
    assert "split[0] of [bold]" in plan_text(record, 80)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PLANS)
def test_plan_stays_within_its_width_and_on_a_screen(name, width):
    lines = plan_text(PLANS[name], width).splitlines()
    assert max(map(len, lines)) <= width
    assert all(line == line.rstrip() for line in lines)
    if width >= 80:
        # Two stacks are shown with three groups each, however little room there is.
        assert len(lines) <= (47 if name == "many" else 42)


def test_plan_is_plain_text_whatever_the_terminal(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "72")
    lines = plan_text(PLAN).splitlines()
    assert "\x1b" not in "\n".join(lines)
    assert 60 < max(map(len, lines)) <= 72


def test_wide_plan_has_decision_and_reason_on_one_line():
    text = plan_text(PLAN, 160)
    (line,) = (line for line in text.splitlines() if "attention output" in line)
    assert line == (
        "  offload    5.00 GiB  32 ×  attention output (model.py:41)    "
        "hidden behind the layer's own work; computing it again takes 3.1 ms"
    )


def test_reasons_say_whose_figures_they_are():
    def groups(*values):
        text = plan_text(changed(PLAN, decisions=values, pins=()), 160)
        return [line for line in text.splitlines() if " × " in line]

    reasons = {mib: f"costs 2.0 ms, frees {mib}.0 MiB a layer" for mib in (8, 64)}
    small, large = (
        decision("mul", "recompute", mib, reason=reason, value=mib)
        for mib, reason in reasons.items()
    )
    (one,) = groups(large)
    assert one.endswith("32 ×  mul  costs 2.0 ms, frees 64.0 MiB a layer")
    (alike,) = groups(large, dataclasses.replace(large, value=1))
    assert alike.endswith("64 ×  mul  each: costs 2.0 ms, frees 64.0 MiB a layer")
    (mixed,) = groups(small, large)
    assert "2.25 GiB  64 ×" in mixed
    assert mixed.endswith("largest: costs 2.0 ms, frees 64.0 MiB a layer")


def test_copies_that_take_longer_than_a_layer_are_no_percentage():
    stack = dataclasses.replace(
        PLAN.program.stacks[0], forward_window_used=57.49, backward_window_used=1.2
    )
    text = plan_text(changed(PLAN, stacks=(stack,)), 160)
    assert "forward 50.1 ms a layer (copies take 57 × a layer's time)" in text
    assert "backward 100.2 ms (copies take 1.2 × a layer's time)" in text


def test_limit_on_pinned_host_memory_is_said_where_something_is_there():
    note = "for more set XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=128"
    record = changed(PLAN, notes=(note, "Another note."))
    assert note in plan_text(record, 160)
    without = plan_text(changed(record, host_bytes=0), 160)
    assert note not in without
    assert "Another note." in without


def test_narrow_tables_lose_columns_and_no_digits():
    lines = plan_text(many(4), 60).splitlines()
    (header,) = (line for line in lines if line.startswith("  per device"))
    assert header.split() == ["per", "device", "device", "step", "time", "fits"]
    rows = [line for line in lines if line.startswith("  save_dot")]
    assert all(row.split()[1:3] == ["1023.0", "GiB"] for row in rows)
    assert all(row.split()[-3:-1] == ["123.45", "s"] for row in rows)
    text = inspection_text(INSPECTION, 60)
    assert "total        60.0 GiB  5.00 GiB\n" in text


def test_inspection_at_80_columns():
    assert inspection_text(INSPECTION, 80) == (
        """\
jit_train_step on v5p-8: 60.0 GiB of device and 5.00 GiB of host memory, 1
hazard

per device  arguments   outputs    donated  temporary     total
device       30.0 GiB  29.0 GiB  -29.0 GiB   30.0 GiB  60.0 GiB
host                –         –          –   5.00 GiB  5.00 GiB

step        6.35 s, simulated from the compiled schedule
of which    computing 6.13 s, waiting for the host 110.0 ms, waiting for other
            devices 110.0 ms
links busy  device to host 350.0 ms, host to device 360.0 ms, collectives 1.20 s
products    2500 TFLOP of matrix products per step

copies     per step  number  manner        what
to host    4.84 GiB    31 ×  asynchronous  model.py:41 (stowax.offload.lay…
to device  4.85 GiB    32 ×                all
           4.84 GiB    31 ×  asynchronous  model.py:41 (stowax.offload.lay…
           8.00 MiB     1 ×  synchronous   model.py:52 (stowax.offload.lay…

HAZARD host-compute, 1 place
  what    Arithmetic runs on the host's processor.
  where   /home/me/train/model.py:52 (jit(train_step)/dot_general)
  cost    1.2 GFLOP of matrix products, 3.0 GiB read and written on the host
  remedy  Bring the operands to the device before the arithmetic.

not priced  custom-call tpu_custom_call, 64 × per step: no estimate in the
            program; taken to cost 31.0 ms
assumed     The link carries both directions at full rate at once."""
    )


def test_inspection_groups_copies_and_keeps_totals():
    copies = tuple(
        transfer("device-to-host", 16, 32, line=line, name=f"copy-start.{n}")
        for line in range(1, 9)
        for n in range(3)
    )
    found = dataclasses.replace(INSPECTION, transfers=copies, hazards=())
    text = inspection_text(found, 80)
    # 8 lines x 3 copies x 32 trips of 16 MiB are 12 GiB; 5 lines are shown, 3 folded.
    assert "to host  12.0 GiB   768 ×                all\n" in text
    assert text.count("1.50 GiB    96 ×  asynchronous") == 5
    assert "4.50 GiB   288 ×                smaller ones" in text
    assert "No hazards found." in text


def test_inspection_shows_a_remedy_once_and_counts_the_rest():
    hazards = tuple(
        dataclasses.replace(INSPECTION.hazards[0], where=f"model.py:{i}", seconds=0.25)
        for i in range(7)
    )
    text = inspection_text(dataclasses.replace(INSPECTION, hazards=hazards), 80)
    assert "HAZARD host-compute, 7 places" in text
    assert text.count("remedy") == 1
    assert "and 3 places more, 750.0 ms" in text


@pytest.mark.parametrize("width", WIDTHS)
def test_inspection_and_targets_stay_within_their_width(width):
    rows = targets_table()
    texts = [inspection_text(INSPECTION, width), targets_text(rows, width)]
    texts += [target_text(row, width) for row in rows]
    assert max(len(line) for text in texts for line in text.splitlines()) <= width


def test_targets_table_marks_every_figure_that_is_not_the_makers():
    rows = targets_table()
    lines = targets_text(rows, 80).splitlines()
    drawn = {line.split(" ")[0]: line for line in lines}
    # Measured limit of the compiler, quoted bandwidth; nobody knows TPU7x's link.
    assert drawn["v5p-8"].split()[3:5] == ["95.7*", "2765"]
    assert drawn["h200"].split()[3] == "106~"
    assert drawn["tpu7x-2"].split()[-3:-1] == ["?", "?"]
    legend = next(line for line in lines if line.startswith("* measured"))
    assert "~ assumed" in legend
    assert "? unknown" in legend


def test_targets_list_names_a_source_for_every_figure_shown():
    rows = targets_table()
    text = " ".join(targets_text(rows, 160).split())
    for chip in (row.chip for row in rows):
        for figure in (chip.allowed_bytes, chip.memory_bandwidth, chip.host_bytes):
            assert " ".join(f"{figure.kind}, {figure.source}".split()) in text


def test_one_target_shows_every_figure_with_kind_and_source():
    (row,) = (row for row in targets_table() if "h200" in row.names)
    text = " ".join(target_text(row, 160).split())
    for name, figure in row.chip.figures():
        assert name in text
        assert " ".join(figure.source.split()) in text
    assert "memory bandwidth 4800 GB/s quoted" in text
