"""The command line: exit codes, what stands on stdout, and what an error says."""

import json
import os
import pathlib
import subprocess
import sys
import textwrap

import pytest
from click.testing import CliRunner

import stowax
from stowax._cli._cli import main
from stowax._cli._user_file import where_it_failed

STEP = """
    import jax, jax.numpy as jnp
    import stowax

    @stowax.stow
    def loss_fn(w, x):
        def layer(x, w):
            return jnp.tanh(x @ w), None
        return jnp.mean(jax.lax.scan(layer, x, w)[0])

    def train_step(w, x):
        loss, gradient = jax.value_and_grad(loss_fn)(w, x)
        return w - 0.1 * gradient, loss

    def make():
        print("building the step")
        w = jax.ShapeDtypeStruct((4, 64, 64), "float32")
        x = jax.ShapeDtypeStruct((2048, 64), "float32")
        return train_step, (w, x)
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a file into an empty folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(source, name="train.py"):
        (tmp_path / name).write_text(textwrap.dedent(source))
        return tmp_path / name

    known = set(sys.modules)
    yield write
    for name in set(sys.modules) - known:
        if name.startswith(("train", "stowax_user_")):
            del sys.modules[name]


def run(*words):
    """Exit code, stdout and stderr of `stowax *words`, in this process."""
    result = CliRunner().invoke(main, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def error_of(*words):
    """The error message of a run that could not be done; stdout has to be empty."""
    code, out, err = run(*words)
    assert code == 2
    assert out == ""
    assert err.count("error: ") == 1
    assert "Traceback" not in err
    return err.split("error: ")[1].rstrip()


def test_plan_prints_the_plan_and_nothing_else(write):
    write(STEP)
    code, out, err = run("plan", "train.py:make", "--target", "cpu")
    assert code == 0
    assert out.startswith("stowax plan for train_step on cpu")
    assert "building the step" in err


def test_plan_as_json_is_what_is_saved(write, tmp_path):
    write(STEP)
    words = ("plan", "train.py:make", "--target", "cpu", "-o", "plan.json", "--json")
    code, out, _ = run(*words)
    assert code == 0
    assert json.loads(out) == json.loads((tmp_path / "plan.json").read_text())
    assert stowax.load_plan("plan.json").to_json() == json.loads(out)


def test_plan_that_does_not_fit_is_found(write):
    write(STEP)
    code, out, _ = run("plan", "train.py:make", "--target", "cpu", "--budget", "64KiB")
    assert code == 1
    assert "DOES NOT FIT 64.0 KiB per device" in out


def test_options_reach_the_planner(write, monkeypatch):
    write(STEP)
    given = {}

    def plan(step, *args, progress, **options):
        given.update(options, step=step.__name__, args=len(args))
        progress("planning")
        raise stowax.StowaxError("enough")

    monkeypatch.setattr(stowax, "plan", plan)
    code, _, err = run(
        *("plan", "train.py:make", "--budget", "1GiB", "--host-budget", "2GiB"),
        *("--host-reserve", "512MiB"),
        *("--target", "v5p-8", "--pin", "*a=b*=keep", "--pin", "x=offload"),
        *("--forbid", "recompute", "--keep-checkpoint", "--compiles", "9"),
        *("--cache", "programs"),
    )
    assert code == 2
    assert "planning" in err
    assert given == {
        "step": "train_step",
        "args": 2,
        "budget": "1GiB",
        "host_budget": "2GiB",
        "host_reserve": "512MiB",
        "target": "v5p-8",
        "pin": {"*a=b*": "keep", "x": "offload"},
        "forbid": ("recompute",),
        "keep_checkpoint": True,
        "compiles": 9,
        "cache": "programs",
    }


@pytest.mark.slow
def test_several_budgets_are_a_table(write):
    write(STEP)
    words = ("plan", "train.py:make", "--target", "cpu", "--cache", "programs")
    both = (*words, "--budget", "1GiB", "--budget", "64KiB")
    code, out, err = run(*both)
    assert code == 1  # one does not fit
    assert "a plan for 64.0 KiB" in err
    title, headers, small, large, least, *_ = out.splitlines()
    assert title == "stowax plans for train_step on cpu (cpu), per device"
    assert headers.split() == (
        ["budget", "device", "host", "step", "time", "waiting", "vs", "least", "fits"]
    )
    assert (small[:8], small.split()[-1]) == ("64.0 KiB", "no")
    assert large.startswith("1.00 GiB")
    assert large.endswith(("yes", "as it is"))
    assert ": the smallest budget" in least
    _, out, _ = run(*both, "--json")
    assert [made["proof"]["budget_bytes"] for made in json.loads(out)] == [2**30, 2**16]


def test_a_file_takes_one_plan(write, tmp_path):
    write(STEP)
    words = ("plan", "train.py:make", "--target", "cpu", "-o", "plan.json")
    assert error_of(*words, "--budget", "1MiB", "--budget", "2MiB") == (
        "-o: got 'plan.json', and 2 plans. Save the one you want by its own --budget; "
        "with --cache it compiles nothing again."
    )
    words = ("plan", "train.py:make", "--target", "cpu", "--budget", "1MiB")
    assert error_of(*words, "--budget", "16 GB?") == (
        "--budget: got '16 GB?'. Write bytes as an int, or text such as '16GiB', or "
        "'60%' of what the step takes."
    )
    assert error_of(*words, "--compiles", "1") == (
        "--compiles: got 1. Write how many programs may be compiled, 4 or more."
    )
    assert error_of(*words, "--cache", "train.py") == (
        "--cache: got 'train.py', which is no folder and cannot be made one (File "
        "exists). Write the path of a folder that may be written to."
    )


def test_nothing_is_written_where_planning_fails(write, tmp_path):
    write(STEP)
    words = ("plan", "train.py:make", "--target", "cpu", "-o", "plan.json")
    assert error_of(*words, "--budget", "16 GB?").startswith("--budget: got '16 GB?'")
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_file()) == ["train.py"]


def test_inspect_refuses_a_plan_for_another_target(write):
    write(STEP)
    assert run("plan", "train.py:make", "--target", "cpu", "-o", "p.json")[0] == 0
    code, out, err = run("inspect", "train.py:make", "p.json", "--target", "h200")
    assert (code, out) == (2, "")
    assert "--target: got h200, and p.json was made for cpu" in err


def test_inspect_plain_and_under_a_plan(write):
    write(STEP)
    code, out, _ = run("inspect", "train.py:make", "--target", "cpu", "--json")
    plain = json.loads(out)
    assert code == (1 if plain["hazards"] else 0)
    run("plan", "train.py:make", "--target", "cpu", "--budget", "3MiB", "-o", "p.json")
    _, out, _ = run("inspect", "train.py:make", "p.json", "--json")
    under = json.loads(out)
    assert under["memory"]["device"]["total"] < plain["memory"]["device"]["total"]
    _, out, _ = run("inspect", "train.py:make", "p.json")
    assert " on cpu: " in out.splitlines()[0]


@pytest.mark.slow
def test_inspect_measures(write):
    write(STEP.replace("jax.ShapeDtypeStruct(", "jnp.ones("))
    words = ("inspect", "train.py:make", "--measure", "--perfetto", "both.json")
    _, out, _ = run(*words)
    assert "simulated  measured  ratio" in out
    events = json.loads(pathlib.Path("both.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {1, 2}
    _, out, _ = run(*words, "--json")
    assert json.loads(out)["measured"]["origin"] == "measured"
    assert error_of(*words, "--target", "h200") == (
        "--measure: got the target h200, which is not attached. Leave out --target, or "
        "--measure."
    )
    write(STEP)
    assert "got a jax.ShapeDtypeStruct. The step is run" in error_of(*words)


def test_hazards_are_found(write, monkeypatch):
    from report_records import INSPECTION

    write(STEP)
    monkeypatch.setattr(stowax, "inspect", lambda *args, target: INSPECTION)
    code, out, err = run("inspect", "train.py:make", "--perfetto", "trace.json")
    assert code == 1
    assert "HAZARD host-compute" in out
    assert "saved trace.json" in err
    assert json.loads(pathlib.Path("trace.json").read_text())["traceEvents"]
    said = error_of("inspect", "train.py:make", "--perfetto", "gone/trace.json")
    assert said.startswith("--perfetto: got 'gone/trace.json', and '")


@pytest.mark.slow
def test_verify_passes_fails_and_says_what_to_type(write, monkeypatch):
    write(STEP.replace("jax.ShapeDtypeStruct(", "jnp.ones(").replace("0.1 *", "0.5 *"))
    words = ("verify", "train.py:make", "p.json", "--steps", "2")
    run("plan", "train.py:make", "--target", "cpu", "--budget", "3MiB", "-o", "p.json")
    code, out, err = run(*words)
    assert code == 0
    assert out.startswith(
        "stowax verify: train_step under its plan for cpu, run on cpu"
    )
    assert "running the planned step again" in err
    assert error_of(*words, "--reference", "here").startswith("--reference: got 'here'")
    right = stowax.Plan.apply
    monkeypatch.setattr(
        stowax.Plan,
        "apply",
        lambda plan, step: right(plan, lambda w, x: (step(w, x)[0] + 1, step(w, x)[1])),
    )
    code, out, _ = run(*words, "--json")
    assert code == 1
    found = json.loads(out)
    assert [x["path"] for x in found["leaves"] if not x["ok"]] == ["out[0]"]
    assert found["passed"] is False


def test_targets_as_table_and_json():
    code, out, _ = run("targets")
    assert code == 0
    assert "v5p-8 … -4096" in out
    code, out, _ = run("targets", "--json")
    rows = {row["chip"]: row for row in json.loads(out)}
    assert "v5p-8" in rows["v5p"]["names"]
    assert rows["h200"]["figures"]["memory bandwidth"]["value"] == 4800e9
    assert error_of("targets", "h20").startswith("NAME: got 'h20'. Nearest names: h200")


USERS_FAULTS = {
    "no colon": ("train.py", "'train.py' names no function."),
    "no colon, names them": ("train.py", "The file has loss_fn, train_step, make."),
    "no function name": ("train.py:", "'train.py:' is not FILE.py:FUNCTION."),
    "no file": ("trian.py:make", "trian.py does not exist. Nearest: train.py."),
    "no folder": ("gone/a.py:make", "there is no folder gone."),
    "a folder": (".:make", ". is a folder."),
    "no such function": (
        "train.py:mak",
        "train.py has no function mak. It has make, train_step, loss_fn.",
    ),
    "wants arguments": (
        "train.py:train_step",
        "train_step in train.py wants arguments (w, x). It has to take no argument",
    ),
    "no function": ("train.py:stowax", "stowax in train.py is no function but module."),
}


@pytest.mark.parametrize(("where", "said"), USERS_FAULTS.values(), ids=USERS_FAULTS)
def test_wrong_function_names_are_answered(write, where, said):
    write(STEP)
    assert said in error_of("plan", where)


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ("None", "make in train.py returned NoneType. It has to take no argument"),
        ("print", "returned builtin_function_or_method."),
        ("(print, 1, 2)", "returned a tuple of 3."),
        ("(print, 1)", "returned (step, int)."),
        ("(1, ())", "returned (int, ...), and int is no step."),
    ],
)
def test_wrong_results_are_answered(write, result, said):
    write(f"def make():\n    return {result}\n")
    assert said in error_of("plan", "train.py:make")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "\nimport not_there",
            "{}:2: ModuleNotFoundError: No module named 'not_there'",
        ),
        ("def make(:\n", "{}:1: SyntaxError: "),
        ("import sys\nsys.exit(3)", "{}:2: SystemExit: 3"),
    ],
)
def test_files_that_do_not_import_say_where(write, source, said):
    path = write(source)
    error = error_of("plan", "train.py:make")
    assert error.startswith("train.py cannot be imported.\n")
    assert said.format(path) in error


def test_function_that_fails_says_where(write):
    path = write("import math\ndef make():\n    return math.sqrt(-1)\n")
    assert error_of("plan", "train.py:make").startswith(
        f"make in train.py failed.\n{path}:3: ValueError: "
    )


def test_step_that_fails_says_where_and_shows_all_when_asked(write):
    path = write(STEP.replace("jnp.tanh(x @ w)", "jnp.tanh(x @ w.nope)"))
    words = ("plan", "train.py:make", "--target", "cpu")
    error = error_of(*words)
    assert error.startswith(f"{path}:8: AttributeError: ")
    assert error.endswith("The whole traceback: --traceback")
    code, out, err = run(*words, "--traceback")
    assert (code, out) == (2, "")
    assert "Traceback (most recent call last)" in err


@pytest.mark.parametrize("pin", ["attention", "=keep", "*x*=retain"])
def test_wrong_pins_are_answered(write, pin):
    write(STEP)
    assert error_of("plan", "train.py:make", "--pin", pin) == (
        f"--pin: got {pin!r}. Write PATTERN=DECISION, such as '*attention*=keep'; "
        "DECISION is one of keep, offload, recompute."
    )


def test_output_that_cannot_be_written_is_said_before_planning(write):
    write("raise SystemError('too late')")
    said = error_of("plan", "train.py:make", "-o", "gone/plan.json")
    assert said.startswith("-o: got 'gone/plan.json', and '")
    assert error_of("plan", "train.py:make", "-o", ".").startswith("-o: got '.', which")


def test_modules_beside_the_file_are_found_and_names_do_not_collide(write):
    write("def make():\n    return 1\n", name="train_parts.py")
    write("from train_parts import make\nimport json\n", name="json.py")
    assert "make in json.py returned int" in error_of("plan", "json.py:make")
    assert json.loads("1") == 1


def test_long_messages_of_jax_are_cut_after_the_first_paragraph():
    error = TypeError("what is wrong\n\nadvice\nthat goes on")
    assert where_it_failed(error) == "TypeError: what is wrong"


@pytest.mark.parametrize(
    "command", ["plan", "inspect", "verify", "calibrate", "targets", "demo"]
)
def test_help_has_examples(command):
    code, out, _ = run(command, "--help")
    assert code == 0
    assert f"  stowax {command}" in out.split("Example")[1]


@pytest.mark.slow
def test_stdout_is_json_even_if_c_code_prints(write, tmp_path):
    noisy = r'import os; os.write(1, b"noise from C\n"); print("noise")'
    write(STEP.replace('print("building the step")', noisy))
    source = pathlib.Path(stowax.__file__).parents[1]
    result = subprocess.run(
        [sys.executable, "-m", "stowax", "plan", "train.py:make", "--json"],
        env={**os.environ, "PYTHONPATH": str(source), "JAX_PLATFORMS": "cpu"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["program"]["step"] == "train_step"
    assert "noise from C\n" in result.stderr
    assert "noise\n" in result.stderr
