"""Unchanged scripts under a budget, from the command line: `stowax run`."""

import json
import subprocess
import sys
import textwrap

import pytest

SCRIPT = """
    import sys
    import jax, jax.numpy as jnp

    def loss_of(params, x):
        layer = lambda x, w: (x + jnp.tanh(x @ w), None)
        return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

    @jax.jit
    def train_step(params, x):
        loss, grads = jax.value_and_grad(loss_of)(params, x)
        return params - 0.1 * grads, loss

    params, x = 0.01 * jnp.ones((6, 64, 64)), jnp.ones((512, 64))
    for _ in range(int(sys.argv[1])):
        params, loss = train_step(params, x)
        print(float(loss))
    sys.exit(int(sys.argv[2]))
"""


def run(folder, *words):
    (folder / "train.py").write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-m", "stowax", "run", *words]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=folder, check=False
    )


def test_the_command_runs_a_script_unchanged(tmp_path):
    options = ("--budget", "60%", "--target", "h200", "-o", "plan.json")
    done = run(tmp_path, *options, "train.py", "3", "5")
    assert done.returncode == 5, done.stderr
    assert len(done.stdout.split()) == 3
    assert "stowax plan for train_step on h200" in done.stderr
    assert json.loads((tmp_path / "plan.json").read_text())["proof"]["fits"]
    # The plan that was saved is what the next run goes by.
    again = run(tmp_path, "--plan", "plan.json", "train.py", "3", "0")
    assert again.returncode == 0, again.stderr
    assert again.stdout == done.stdout
    assert "compiling" not in again.stderr
    line = "train_step runs under the plan in plan.json, made for h200: "
    (said,) = [text for text in again.stderr.splitlines() if text.startswith(line)]
    assert " MiB of " in said


@pytest.mark.slow
def test_the_traceback_of_a_script_that_fails_comes_last(tmp_path):
    options = ("--budget", "60%", "--target", "h200", "-o", "plan.json")
    done = run(tmp_path, *options, "train.py", "3", "fails")
    assert done.returncode == 1
    assert "stowax plan for" not in done.stderr
    saved, *_, last = done.stderr.split("saved plan.json\n")[-1].splitlines()
    assert saved == "Traceback (most recent call last):"
    assert last.startswith("ValueError: ")
    assert (tmp_path / "plan.json").exists()


@pytest.mark.slow
def test_the_command_says_what_does_not_fit(tmp_path):
    done = run(tmp_path, "--budget", "64KiB", "--target", "h200", "train.py", "1", "0")
    assert done.returncode == 1
    assert "The smallest budget " in done.stderr
    assert done.stdout == ""
