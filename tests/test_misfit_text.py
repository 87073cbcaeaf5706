"""What is said of a plan that does not fit: in the plan, and in the error."""

import dataclasses

from plan_parts import changed
from report_records import GIB, INFEASIBLE
from stowax._explain._describe import _NESTED
from stowax._plan._effect import why_it_does_not_fit
from stowax.report import plan_text

PLAIN = changed(INFEASIBLE, forbid=())
COMPILED = changed(PLAIN, smallest_budget_is="compiled")


def test_what_is_compiled_works_and_what_is_predicted_is_about_so_much():
    known = plan_text(COMPILED, 80)
    assert "it takes    43.0 GiB: the smallest budget known to work\n" in known
    guessed = plan_text(PLAIN, 80)
    assert "it takes    about 43.0 GiB, predicted: the smallest budget\n" in guessed


def test_why_it_does_not_fit_is_short_lines():
    assert why_it_does_not_fit(PLAIN) == (
        "plan: it does not fit 16.0 GiB of the device.\n"
        "Its program takes 60.0 GiB of the device and 5.00 GiB of the host.\n"
        "The smallest budget is about 43.0 GiB, as predicted.\n"
        "In the way:\n"
        "  parameters and optimizer state: 38.2 GiB\n"
        "  gradients: 4.1 GiB\n"
        "Give a larger budget, a smaller batch (stowax.fit finds the largest), or more "
        "devices."
    )
    known = why_it_does_not_fit(COMPILED)
    assert "\nThe smallest budget known to work is 43.0 GiB.\n" in known


def test_a_plan_for_a_cpu_names_other_machines():
    program = dataclasses.replace(INFEASIBLE.program, target="cpu")
    lines = why_it_does_not_fit(dataclasses.replace(PLAIN, program=program))
    assert " ".join(lines.split()).endswith(
        "or more devices. This is for the CPU that is here, which has no other memory. "
        "Another machine, such as target='h200', may have a plan that this one has not."
    )


def test_wishes_and_long_reasons():
    long = "parameter: 2.50 MiB, " + "of which some stays, " * 6 + "for a reason"
    proof = dataclasses.replace(
        INFEASIBLE.proof, in_the_way=(long, *INFEASIBLE.proof.in_the_way)
    )
    made = dataclasses.replace(changed(PLAIN, forbid=("offload",)), proof=proof)
    text = why_it_does_not_fit(made)
    assert all(len(line) <= 88 for line in text.splitlines())
    assert "Give a larger budget, fewer pins and forbids, a smaller batch" in text
    assert "\n    " in text


def test_sizes_that_are_written_alike_are_written_in_bytes():
    made = changed(PLAIN, budget_bytes=60 * GIB - 1)
    first, takes, *_ = why_it_does_not_fit(made).splitlines()
    assert first == f"plan: it does not fit {60 * GIB - 1} B of the device."
    assert takes.startswith(f"Its program takes {60 * GIB} B of the device")


def test_notes_that_say_why_little_is_planned_come_first():
    why, _, _ = _NESTED.partition(":")
    notes = ("XLA's estimates are old", why)
    lines = why_it_does_not_fit(changed(PLAIN, notes=notes)).splitlines()
    assert lines[3:6] == [
        "In the way:",
        f"  {why}",
        "  parameters and optimizer state: 38.2 GiB",
    ]
