"""The head of a page: the verdict and the four answers, and that they are all true."""

import dataclasses
import re

import pytest

from page_records import MIB, block, curve_of, found, moment
from plan_parts import changed
from report_records import GIB, INSPECTION, PLAN
from stowax._records._inspection import Hazard, Omission
from stowax._records._peak import MemoryPeak, PeakArray, Treatment
from stowax.report import inspection_page
from stowax.report._page_head import head_html
from stowax.report._page_verdict import verdict_of


def texts(inspection, plan=None):
    """Each card's text by its title."""
    page = head_html(inspection, plan)
    cards = re.findall(r'<section class="card"><h2>(.*?)</h2>(.*?)</section>', page)
    return {title: re.sub(r"<[^>]*>", "|", body) for title, body in cards}


def small(**fields):
    """Needs 240 MiB, as its curve says."""
    inspection = found()
    use = dataclasses.replace(
        inspection.memory.device, argument=100 * MIB, output=0, alias=0, temp=140 * MIB
    )
    host = dataclasses.replace(use, argument=0, temp=8 * MIB)
    memory = dataclasses.replace(inspection.memory, device=use, host=host)
    return dataclasses.replace(inspection, memory=memory, **fields)


PEAK = MemoryPeak(
    predicted_bytes=240 * MIB,
    phase="backward",
    source="/home/me/model.py:9",
    arrays=(
        PeakArray(
            role="activation",
            name="jit(step)/tanh",
            shape="float32[8]",
            source="/home/me/model.py:7",
            count=4,
            bytes=160 * MIB,
            padding=0,
        ),
        PeakArray(
            role="logits",
            name="jit(step)/dot_general",
            shape="float32[9]",
            source="/home/me/model.py:8",
            count=1,
            bytes=80 * MIB,
            padding=0,
        ),
    ),
    treatments=(
        Treatment(
            what="recompute every layer", needs_bytes=90 * MIB, frees_bytes=150 * MIB
        ),
    ),
)


@pytest.mark.parametrize(
    ("fields", "budget", "fits", "text"),
    [
        ({}, None, "unknown", "It needs 240.0 MiB; what a device has is not known"),
        (
            {"capacity_bytes": 320 * MIB},
            None,
            "yes",
            "Fits the device: 240.0 of 320.0 MiB (75%)",
        ),
        (
            {"capacity_bytes": 200 * MIB},
            None,
            "no",
            "Does NOT fit: it needs 240.0 MiB, a device has 200.0 MiB",
        ),
        (
            {"capacity_bytes": GIB},
            250,
            "yes",
            "Fits the budget: 240.0 of 250.0 MiB (96%); a device has 1.00 GiB",
        ),
        (
            {"capacity_bytes": GIB},
            239,
            "no",
            "Does NOT fit the budget: 240.0 of 239.0 MiB; a device has 1.00 GiB",
        ),
        (
            {"capacity_bytes": 2**40},
            None,
            "yes",
            "Fits the device: 240.0 MiB of 1.00 TiB (under 1%)",
        ),
        # A budget above what a device has is no excuse.
        (
            {"capacity_bytes": 200 * MIB},
            250,
            "no",
            "Does NOT fit: it needs 240.0 MiB, a device has 200.0 MiB",
        ),
    ],
)
def test_the_verdict_is_a_word_with_its_figures(fields, budget, fits, text):
    plan = changed(PLAN, budget_bytes=budget * MIB) if budget else None
    verdict = verdict_of(small(**fields), plan)
    assert (verdict.fits, verdict.text) == (fits, text)
    page = inspection_page(small(**fields), plan)
    sign = {"yes": "✓", "no": "✗", "unknown": "?"}[fits]
    assert (
        f'<div class="verdict {fits}"><span class="sign" aria-hidden="true">{sign}'
        in page
    )


def test_more_host_memory_than_planned_is_no_fit():
    plan = changed(PLAN, budget_bytes=250 * MIB, host_budget_bytes=4 * MIB)
    verdict = verdict_of(small(), plan)
    assert verdict.fits == "no"
    assert verdict.text == "Does NOT fit the host budget: 8.00 of 4.00 MiB"


def test_the_plan_says_what_it_did():
    text = " ".join(verdict_of(small(), PLAN).more)
    # 32 layers: 2 MiB kept, 160 MiB offloaded, twice 448 MiB recomputed.
    assert "The plan keeps 64.0 MiB, offloads 5.00 GiB, recomputes 28.0 GiB." in text
    unneeded = changed(PLAN, outcome="unneeded")
    assert "leaves the step as it is written" in verdict_of(small(), unneeded).more[0]


def test_another_figure_of_memory_has_its_reason():
    assert verdict_of(small(), None).more == ()
    use = dataclasses.replace(small().memory.device, temp=160 * MIB)
    memory = dataclasses.replace(small().memory, device=use)
    (line,) = verdict_of(dataclasses.replace(small(), memory=memory), None).more
    assert line.startswith("Drawn are arrays, 240.0 MiB at most; the rest are gaps")
    use = dataclasses.replace(use, temp=120 * MIB)
    memory = dataclasses.replace(small().memory, device=use)
    (line,) = verdict_of(dataclasses.replace(small(), memory=memory), None).more
    assert "240.0 MiB at most; XLA's own total is less" in line


def test_what_does_not_fit_says_what_is_in_the_way_and_what_helps():
    inspection = small(capacity_bytes=200 * MIB, peak=PEAK)
    (line,) = verdict_of(inspection, None).more
    assert line == (
        "At the predicted peak: 160.0 MiB activation (model.py:7), "
        "80.0 MiB logits (model.py:8)."
    )
    to_do = texts(inspection)["To do"]
    assert "Recompute every layer: leaves 90.0 MiB, predicted" in to_do
    assert "80.0 MiB of logits are made outside of repeated layers" in to_do
    peak = dataclasses.replace(
        PEAK, smallest_budget=50 * MIB, smallest_budget_is="predicted"
    )
    to_do = texts(dataclasses.replace(inspection, peak=peak))["To do"]
    assert "Plan it: about 50.0 MiB, predicted: the smallest budget" in to_do
    assert "Recompute every layer" not in to_do
    peak = dataclasses.replace(peak, smallest_budget=201 * MIB)
    to_do = texts(dataclasses.replace(inspection, peak=peak))["To do"]
    assert "No plan fits: about 201.0 MiB, predicted" in to_do


def test_the_roles_of_the_peak_and_the_largest_place():
    fills = texts(small())["Fills memory"]
    parts = [part for part in fills.split("|") if part]
    assert parts[:6] == [
        *("parameter", "100.0 MiB", "kept activation", "80.0 MiB"),
        *("workspace", "60.0 MiB"),
    ]
    assert parts[6].startswith("Largest: model.py:10  ")
    assert parts[6].endswith(", 100.0 MiB")
    # Without a curve: arguments, outputs, temporaries.
    assert "temporary" in texts(INSPECTION)["Fills memory"]


def test_layers_that_are_alike_are_one_place():
    alike = [block(f"fusion.{k}", 10, "kept activation", 0, 9) for k in range(12)]
    named = [
        dataclasses.replace(
            b, framework_name="jit(step)/jvp(M)/Block_0/tanh", source=""
        )
        for b in alike
    ]
    curve = curve_of(named, [moment(0.0, 0, kept_activation=120)])
    memory = dataclasses.replace(found().memory_timeline, device=curve)
    inspection = small(memory_timeline=memory)
    line = texts(inspection)["Fills memory"]
    assert "Largest: 12 × Block_0/tanh  float32[10,1024,256], 120.0 MiB" in line
    page = inspection_page(inspection)
    (body,) = re.findall(
        r'<table id="peak-device".*?<tbody>(.*?)</tbody>', page, re.DOTALL
    )
    assert body.count("<tr>") == 1
    assert 'title="jit(step)/jvp(M)/Block_0/tanh">Block_0/tanh' in body


def test_what_moves_and_what_stalls():
    inspection = small(flops=3e12, nominal_seconds=1.5)
    cards = texts(inspection)
    assert "8.00 MiB of host memory" in cards["Moves"]
    assert "6.00 s a step, simulated" in cards["Stalls"]
    assert "500.0 ms, 8%, waiting for the host" in cards["Stalls"]
    assert "3 TFLOP, 25% of the chip&#x27;s peak rate" in cards["Stalls"]
    still = dataclasses.replace(
        inspection,
        transfers=(),
        nominal_seconds=0.0,
        timeline=dataclasses.replace(
            inspection.timeline,
            exposed_seconds=0.0,
            collective_wait_seconds=0.0,
            compute_seconds=6.0,
        ),
    )
    cards = texts(dataclasses.replace(still, flops=144.7e6))
    assert "Matrix products: 144.7 MFLOP|" in cards["Stalls"]
    assert "Nothing moves" in cards["Moves"]
    assert "No stall: the device waits for nothing" in cards["Stalls"]
    assert "peak rate" not in cards["Stalls"]


def hazard(kind, remedy):
    return Hazard(
        kind=kind,
        where="model.py:7",
        cost="1 ms",
        remedy=remedy,
        instruction="copy.1",
        count=1,
        seconds=1e-3,
    )


def test_hazards_have_their_remedy_in_a_line():
    hazards = (
        hazard("unhidden-copy", "Start it early; or keep it."),
        hazard("unhidden-copy", "Start it early; or keep it."),
        hazard("small-copy", "Join them. Or not."),
        hazard("duplicate-copy", "Fetch once."),
    )
    to_do = texts(small(hazards=hazards))["To do"].replace("|", "")
    assert "unhidden-copy (2 ×): Start it early." in to_do
    assert "small-copy: Join them." in to_do
    assert "and 1 kind more" in to_do
    assert "Nothing found" not in to_do


def test_nothing_found_says_what_was_not_looked_for():
    one = (Omission(what="small-copy", reason="none"),)
    to_do = texts(small(omissions=one))["To do"]
    assert "Nothing found" in to_do
    assert "1 thing could not be looked at" in to_do


def test_a_plan_over_its_budget_says_what_the_least_is():
    plan = changed(PLAN, budget_bytes=200 * MIB, smallest_budget=230 * MIB)
    to_do = texts(small(), plan)["To do"]
    assert "Plan with a larger budget: about 230.0 MiB, predicted" in to_do
    assert "A larger budget may move less and stall less" in to_do
