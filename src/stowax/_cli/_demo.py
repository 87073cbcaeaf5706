"""The demo: a small GPT trained plain and under a plan, then a large one planned.

It runs `examples/char_gpt.py`, an ordinary training script with stowax's one line in
it, and shows that line as it stands there. The large model is planned for a TPU and a
GPU that are not there; nothing of it is ever run.

The example is found in the checkout, or as `_char_gpt.py` in a built wheel.
"""

import importlib.util
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from .._errors import ArgumentError, MissingExtraError
from .._units import format_bytes, format_seconds
from ..report import plan_text

Say = Callable[[str], Any]

STEPS = 60
"""Steps of each of the two runs."""

BUDGET_SHARE = 0.6
"""Part of what the plain step needs that the planned one may use."""

AGREE = 1e-3
"""Largest difference between two losses that are called equal, relative.

The planned step computes the same sums, which the compiler may fuse otherwise; Adam
divides by small numbers and makes the last bits grow from step to step."""

LARGE_BUDGETS = (("v5p-8", "48GiB"), ("h200", "24GiB"))
"""Targets of the large model, each with a budget that does not hold everything."""

_BARS = "▁▂▃▄▅▆▇█"


def run_demo(say: Say, progress: Callable[[str], None]) -> int:
    """Runs all of it; `say` gets the result, `progress` what is going on.

    **Returns:** 0, or 1 where the losses differ or a plan does not fit.

    **Raises:** `MissingExtraError` without optax.
    """
    started = time.perf_counter()
    example = load_example()
    for line in the_line(example):
        say(line)
    good = train_twice(example, say, progress)
    for target, budget in LARGE_BUDGETS:
        good &= plan_large(example, target, budget, say, progress)
    say(f"\nThe demo took {format_seconds(time.perf_counter() - started)}.")
    return 0 if good else 1


def load_example() -> ModuleType:
    """`examples/char_gpt.py` as a module.

    **Raises:** `MissingExtraError` where optax is not installed.
    """
    if importlib.util.find_spec("optax") is None:
        raise MissingExtraError(
            "the demo trains with optax, which is not installed. "
            'Run: pip install "stowax[demo]"'
        )
    here = pathlib.Path(__file__).parents[1]
    places = (
        here / "_char_gpt.py",
        here.parents[1] / "examples" / "char_gpt.py",
        pathlib.Path("examples") / "char_gpt.py",
    )
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise ArgumentError(
            "demo",
            "an installation without examples/char_gpt.py",
            "Run it in a checkout of stowax.",
        )
    name = "stowax_demo_char_gpt"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def the_line(example: ModuleType) -> list[str]:
    """The marked line of the example's source, numbered."""
    source = pathlib.Path(str(example.__file__)).read_text().splitlines()
    lines = ["examples/char_gpt.py is an ordinary training script, but for:", ""]
    for i, line in enumerate(source):
        if "# stowax, the line" in line:
            lines.append(f"  {i + 1:4d}   {line.strip()}")
    return [*lines, ""]


def train_twice(example: ModuleType, say: Say, progress: Callable[[str], None]) -> bool:
    """Trains the small model plain and planned, and shows both losses.

    **Returns:** whether they agree and the plan fits.
    """
    import jax

    import stowax

    config = example.Config()
    text = example.read_text()
    batch = next(example.batches(config, text))
    step = example.make_train_step(config)
    state = example.initial_state(config)
    plain = jax.jit(step)
    progress("compiling the plain step for the CPU")
    needs = stowax.inspect(plain, state, batch, target="cpu").memory.device.total
    budget = int(BUDGET_SHARE * needs)
    progress("planning for the CPU")
    planned = stowax.jit(step, budget=budget, target="cpu", progress=progress)
    planned.lower(state, batch)
    plan = planned.plan
    say(
        f"{config.layers} layers of width {config.width} on the CPU: the plain step "
        f"needs {format_bytes(needs)},\nthe plan may use {format_bytes(budget)}.\n"
    )
    say(f"{plan_text(plan)}\n")

    def losses(run: Callable[..., Any], state: Any) -> list[float]:
        return example.train(run, state, example.batches(config, text), STEPS)

    progress(f"training {STEPS} steps without a plan")
    without = losses(plain, state)
    progress(f"training {STEPS} steps under the plan")
    under = losses(planned, example.initial_state(config))
    for line in loss_lines(without, under):
        say(line)
    return plan.fits and _difference(without, under) <= AGREE


def loss_lines(without: Sequence[float], under: Sequence[float]) -> list[str]:
    """Both curves as a small table, then as bars, then whether they agree.

    >>> loss_lines([4.0, 3.0], [4.0, 3.0])[-1]
    'They agree: the largest difference is 0.0e+00 of the loss.'
    """
    rows = [("step", "plain loss", "planned loss", "difference")]
    last = len(without) - 1
    for i in sorted({round(last * part / 5) for part in range(6)}):
        difference = f"{under[i] - without[i]:+.1e}"
        rows.append((f"{i}", f"{without[i]:.5f}", f"{under[i]:.5f}", difference))
    lines = ["".join(cell.rjust(13) for cell in row) for row in rows]
    low, high = min(*without, *under), max(*without, *under)
    lines += ["", f"   plain     {_bars(without, low, high)}"]
    lines += [f"   planned   {_bars(under, low, high)}", ""]
    difference = _difference(without, under)
    said = "They agree" if difference <= AGREE else "They DIFFER"
    return [*lines, f"{said}: the largest difference is {difference:.1e} of the loss."]


def _difference(without: Sequence[float], under: Sequence[float]) -> float:
    return max(abs(a - b) / abs(a) for a, b in zip(without, under, strict=True))


def _bars(losses: Sequence[float], low: float, high: float) -> str:
    step = max(1, len(losses) // 60)
    scale = (len(_BARS) - 1) / max(high - low, 1e-9)
    return "".join(_BARS[round((loss - low) * scale)] for loss in losses[::step])


def plan_large(
    example: ModuleType,
    target: str,
    budget: str,
    say: Say,
    progress: Callable[[str], None],
) -> bool:
    """Plans the large model for `target` and prints the plan.

    **Returns:** whether it fits; `True` too where the target's compiler is missing,
    which is said.
    """
    import stowax

    large = example.LARGE
    say(
        f"\nThe same model with {large.layers} layers of width {large.width}, "
        f"{large.batch} x {large.sequence} characters,\n"
        f"for {target}, which is not here, in {budget} per device:\n"
    )
    step, args = example.large()
    try:
        plan = stowax.plan(step, *args, budget=budget, target=target, progress=progress)
    except MissingExtraError as error:
        say(f"Skipped: {error}")
        return True
    say(plan_text(plan))
    return plan.fits
