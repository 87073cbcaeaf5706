"""A plan in the words of MaxText's configuration."""

import pathlib
import subprocess
import sys

from plan_parts import changed
from report_records import PLAN, decision
from stowax.integrations import maxtext_remat

SOURCE = pathlib.Path(__file__).parents[1] / "src"


def planned(*decisions):
    return changed(PLAN, decisions=decisions)


def written(text):
    """The keys and their places, comments left out."""
    lines = [line.split("#")[0].strip() for line in text.splitlines()]
    return dict(line.split(": ") for line in lines if line)


def test_each_name_has_the_place_that_the_plan_gives_it():
    plan = planned(
        decision("decoder_layer_input", "offload", 64),
        decision("query_proj", "keep", 32),
        decision("mlpwi_0", "recompute", 128),
    )
    found = written(maxtext_remat(plan))
    assert found["remat_policy"] == "custom"
    assert found["decoder_layer_input"] == "offload"
    assert found["query_proj"] == "device"
    assert found["mlpwi_0"] == "remat"
    # What the model does not have gets what MaxText gives it.
    assert found["moe_mlpwo"] == "remat"
    assert len(found) == 24


def test_what_the_configuration_cannot_say_stands_in_comments():
    text = maxtext_remat(
        planned(
            decision("context", "offload", 96),
            decision("context", "keep", 32),
            decision("mul  normalizations.py:98 in __call__", "keep", 8),
            decision("rsqrt normalizations.py:98", "recompute", 8),
            decision("args[0].mu", "offload", 512, role="optimizer state"),
        )
    )
    assert "context: offload  # the plan decides differently layer by layer\n" in text
    assert text.endswith(
        "# The plan has optimizer state in host memory and streams it through the step."
        "\n# MaxText's own switch moves all of it, at another cost:\n"
        "# optimizer_memory_host_offload: true\n"
        "# Stored by the plan, and without a name in MaxText: recomputed here.\n"
        "#   keep: mul normalizations.py:98 in __call__\n"
    )


def test_it_needs_no_framework():
    code = (
        "import sys; import stowax.integrations; "
        "print(sorted({'maxtext', 'flax', 'keras'} & set(sys.modules)))"
    )
    run = [sys.executable, "-c", code]
    out = subprocess.run(
        run, env={"PYTHONPATH": str(SOURCE)}, capture_output=True, text=True, check=True
    )
    assert out.stdout == "[]\n"
