"""The demo: what it shows, what it skips, and when it says that something is wrong."""

import importlib.util

import pytest
from click.testing import CliRunner

import stowax
from stowax._cli import _demo
from stowax._cli._cli import main
from stowax._errors import MissingExtraError


@pytest.mark.slow
def test_demo_trains_twice_and_agrees(monkeypatch):
    monkeypatch.setattr(_demo, "STEPS", 3)
    monkeypatch.setattr(_demo, "LARGE_BUDGETS", ())
    result = CliRunner().invoke(main, ["demo"])
    assert result.exit_code == 0, result.output
    assert result.stdout.count("# stowax, the line") == 1
    assert "They agree" in result.stdout
    assert "training 3 steps under the plan" in result.stderr
    # The budget made it compute something again: else the demo would show nothing.
    assert "\n  recompute " in result.stdout


def test_missing_compiler_is_said_and_skipped(monkeypatch):
    def plan(*args, **options):
        raise MissingExtraError('target needs it. Run: pip install "stowax[tpu]"')

    monkeypatch.setattr(stowax, "plan", plan)
    said = []
    example = _demo.load_example()
    assert _demo.plan_large(example, "v5p-8", "40GiB", said.append, said.append)
    assert 'Skipped: target needs it. Run: pip install "stowax[tpu]"' in said


def test_missing_optax_is_one_clear_error(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name == "optax" else found(name),
    )
    result = CliRunner().invoke(main, ["demo"])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert 'Run: pip install "stowax[demo]"' in result.stderr


@pytest.mark.parametrize(("change", "said"), [(0.0, "agree"), (0.01, "DIFFER")])
def test_losses_that_differ_are_not_called_equal(change, said):
    plain = [4.0, 3.0, 2.5]
    lines = _demo.loss_lines(plain, [loss * (1 + change) for loss in plain])
    assert lines[-1].startswith(f"They {said}: the largest difference is {change:.1e}")
