"""A plan's text compares it with the step that its reader has."""

import dataclasses
import re

from plan_parts import changed
from report_records import INFEASIBLE, PLAN, UNNEEDED
from stowax.report import plan_text


def test_the_step_as_written_is_compared_where_it_was_compiled():
    def said(**changes):
        trial = dataclasses.replace(PLAN.search.written, **changes)
        return plan_text(changed(PLAN, written=trial), 80)

    faster = said(compiled_bytes=50 * 2**30, step_seconds=12.7)
    assert "compiles to 50.0 GiB; the plan takes 50.0% less time.\n" in faster
    assert re.search(r"as written, compiled +50.0 GiB +– +12.70 s +yes\n", faster)
    # For a TPU the compiler refuses what does not fit, and says how much it is.
    refused = said(step_seconds=None)
    assert "As written it needs 141.0 GiB.\n" in refused
    assert re.search(r"as written, compiled +141.0 GiB +– +– +no\n", refused)
    assert "the plan is as fast.\n" in said(step_seconds=6.35)
    assert "keep all too, run layers as the plan does, not as written" in faster
    assert "as written" not in plan_text(UNNEEDED, 80).lower()


def test_what_was_not_compiled_is_compared_as_it_is_predicted():
    def said(seconds):
        fields = {"written_predicted_bytes": 141 * 2**30, "written": None}
        return plan_text(changed(PLAN, **fields, written_model_seconds=seconds), 80)

    known = said(5.04)
    needs = "As written: 141.0 GiB predicted"
    assert f"{needs}; by the model the plan takes 25.0% longer.\n" in known
    row = r"as written, predicted +141.0 GiB +5.04 s +-20.0% +no\n"
    assert re.search(row, known)
    assert known.index("▸ this plan, predicted") < known.index("as written, predicted")
    assert "as written, compiled" not in known
    # Of layers that the user has computed again the model knows no seconds.
    unknown = said(0.0)
    assert f"{needs}.\n" in unknown
    assert re.search(r"as written, predicted +141.0 GiB +– +no\n", unknown)
    assert "by the model the plan is as fast.\n" in said(6.3)
    # That a plan is faster only two compiled programs say.
    assert f"{needs}.\n" in said(7.0)
    # A row "keep all" beside it is explained where it is another program.
    assert "keep all too, run layers as the plan does" in known
    assert "keep all too" not in said(6.1)


def test_where_nothing_fits_the_step_as_it_is_may_need_the_least():
    def said(**changes):
        return " ".join(plan_text(changed(INFEASIBLE, **changes), 80).split())

    assert "Of what was compiled, the decisions below need the least." in said()
    left = said(decisions=(), step_seconds=6.0)
    assert "Of what was compiled, the step as it is needs the least." in left
    assert "policies run layers as loops or segments, not as written" in left
