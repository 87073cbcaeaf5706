"""Plans of `stowax.jit` that are kept from one process to the next."""

import contextlib
import functools
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stowax
from stowax._errors import ArgumentError, PlanMismatchError
from test_jit import arguments, loss_of, losses, train_step


def planned(cache, step=train_step, said=None, **options):
    options = {"budget": "60%", "target": "h200", **options}
    progress = False if said is None else said.append
    return stowax.jit(step, cache=cache, progress=progress, **options)


def surveys(said):
    return [line for line in said if line.startswith("surveying")]


@pytest.fixture
def searches(cache, monkeypatch):
    """The questions that were searched for; all have the plan in `cache` as answer."""
    asked = []
    (path,) = (cache / "plans").iterdir()
    plan = stowax.load_plan(path)

    def found(question, **_):
        asked.append(question)
        return (plan,)

    monkeypatch.setattr("stowax._plan._planning.found_for", found)
    return asked


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A folder with one plan."""
    folder = tmp_path_factory.mktemp("cache")
    step = planned(folder)
    losses(step, 1)
    (kept,) = (folder / "plans").iterdir()
    assert json.loads(kept.read_text()) == json.loads(json.dumps(step.plan.to_json()))
    return folder


def plans_in(folder):
    return {path.name for path in (folder / "plans").iterdir()}


@pytest.mark.slow
def test_what_was_planned_before_is_not_planned_again(cache):
    said = []
    step = planned(cache, said=said)
    np.testing.assert_allclose(losses(step), losses(jax.jit(train_step)), rtol=1e-5)
    assert not surveys(said)
    assert [line for line in said if "compil" in line] == []
    assert step.plan.fits
    assert len(plans_in(cache)) == 1


@pytest.mark.slow
def test_a_function_that_computes_the_same_is_the_same_step(cache):
    def other(params, momentum, x):
        return train_step(params, momentum, x)

    said = []
    losses(planned(cache, other, said), 1)
    assert not surveys(said)


def another_step(params, momentum, x):
    loss, grads = jax.value_and_grad(functools.partial(loss_of, last=jnp.cos))(
        params, x
    )
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum, loss


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "options"),
    [
        (another_step, {}),
        (train_step, {"budget": "70%"}),
        (train_step, {"forbid": ("offload",)}),
        (train_step, {"donate_argnums": 0}),
        (train_step, {"donate_argnums": ()}),
    ],
    ids=["step", "budget", "forbid", "donated", "nothing donated"],
)
def test_another_question_gets_another_plan(cache, step, options, searches):
    kept = plans_in(cache)
    with contextlib.suppress(PlanMismatchError):  # the answer is another step's
        planned(cache, step, **options).lower(*arguments())
    assert len(searches) == 1
    (new,) = plans_in(cache) - kept
    (cache / "plans" / new).unlink()


def test_a_damaged_file_is_no_plan(tmp_path, cache, searches):
    (name,) = plans_in(cache)
    folder = tmp_path / "plans"
    folder.mkdir()
    whole = (cache / "plans" / name).read_text()
    (folder / name).write_text(whole[: len(whole) // 2])
    losses(planned(tmp_path), 1)
    assert len(searches) == 1
    assert json.loads((folder / name).read_text())["proof"]["fits"]
    assert sorted(os.listdir(folder)) == [name]


def test_a_plan_that_is_another_steps_is_made_anew(tmp_path, cache, searches):
    (name,) = plans_in(cache)
    folder = tmp_path / "plans"
    folder.mkdir()
    data = json.loads((cache / "plans" / name).read_text())
    for stack in data["program"]["stacks"]:
        stack["fingerprint"] = "another"
    (folder / name).write_text(json.dumps(data))
    step = planned(tmp_path)
    np.testing.assert_allclose(losses(step, 2), losses(jax.jit(train_step), 2), 1e-5)
    assert len(searches) == 1


def test_where_nothing_can_be_kept_nothing_is(monkeypatch, tmp_path, searches):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    step = planned(None)
    losses(step, 1)
    assert step.plan.fits
    assert len(searches) == 1
    with pytest.raises(
        ArgumentError, match=r"cache: got 3\. Write the path of a folder"
    ):
        planned(3)


@pytest.mark.slow
def test_a_kept_plan_of_a_state_with_a_number(tmp_path):
    """`step=0` of a state that `jax.lax.cond` updates as a whole, as Flax's has it."""

    def step(state, x):
        params, momentum, loss = train_step(state["params"], state["momentum"], x)
        new = {"params": params, "momentum": momentum, "step": state["step"] + 1}
        keep = lambda: {**state, "step": state["step"] + 0}
        return jax.lax.cond(jnp.isfinite(loss), lambda: new, keep), loss

    def train():
        params, momentum, x = arguments()
        state, found = {"params": params, "momentum": momentum, "step": 0}, []
        said = []
        jitted = planned(tmp_path, step, said, pin={"optimizer state": "offload"})
        for _ in range(3):
            state, loss = jitted(state, x)
            found.append(float(loss))
        return said, found

    (first, ours), (second, again) = train(), train()
    assert surveys(first)
    assert not surveys(second)
    assert ours == again
    np.testing.assert_allclose(ours, losses(jax.jit(train_step), 3), rtol=1e-5)


RESTARTED = """
import sys
import jax
import jax.numpy as jnp
import stowax

def loss_of(params, x):
    layer = lambda x, w: (x + jnp.tanh(x @ w), None)
    return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

def train_step(params, x):
    loss, grads = jax.value_and_grad(loss_of)(params, x)
    return params - 0.1 * grads, loss

step = stowax.jit(train_step, budget="60%", target="h200", progress=print)
params, x = jnp.ones((4, 32, 32)) / 100, jnp.ones((512, 32))
for _ in range(2):
    params, loss = step(params, x)
print("loss", float(loss), "fits", step.plan.fits)
for part in ("_search", "_planner", "report"):
    if f"stowax.{part}" in sys.modules:
        print("loaded", part)
"""


@pytest.mark.slow
def test_a_script_that_is_started_again(tmp_path):
    """Another process, with other hashes, knows the step again, and loads no search."""

    def run(seed):
        known = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
        out = subprocess.run(
            [sys.executable, "-c", RESTARTED],
            env={**known, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        return out.splitlines()

    first, second = run("1"), run("2")
    assert surveys(first)
    assert second == [first[0], first[-4]]  # traced, and run
    assert first[-3:] == ["loaded _search", "loaded _planner", "loaded report"]
    assert len(list((tmp_path / "stowax" / "plans").iterdir())) == 1


@pytest.mark.slow
def test_planning_that_is_interrupted_leaves_nothing_behind(tmp_path):
    """Ctrl-C at a line of progress: the next call plans as if it were the first."""

    def interrupts_at(word):
        def say(line):
            if word in line:
                raise KeyboardInterrupt

        return say

    for word in ("tracing", "surveying", "compiled in"):
        step = stowax.jit(
            train_step,
            budget="60%",
            target="h200",
            cache=tmp_path,
            progress=interrupts_at(word),
        )
        with pytest.raises(KeyboardInterrupt):
            step(*arguments())
        assert step.plan is None
        assert not [*tmp_path.glob("plans/*")]
    again = planned(tmp_path)
    np.testing.assert_allclose(losses(again), losses(jax.jit(train_step)), rtol=1e-5)
    assert len(plans_in(tmp_path)) == 1
