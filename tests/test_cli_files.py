"""What a command has worked out is not lost where a file or a reader is."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from stowax._cli import _base
from stowax._errors import ArgumentError
from test_cli import STEP, run, write  # noqa: F401
from test_cli_audit import LOOP

# A process of its own finds stowax where this one does.
USUAL = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}


def test_a_file_that_fails_loses_neither_the_result_nor_the_others(capsys, tmp_path):
    def fails(path):
        raise ArgumentError("path", f"{path!r}, a full disk", "Make room.")

    good = tmp_path / "page.html"
    files = {"-o": ("plan.json", fails), "--html": (str(good), lambda _: good.touch())}
    with pytest.raises(ArgumentError) as caught:
        _base.hand_over("the plan", {**files, "--perfetto": (None, fails)})
    assert str(caught.value) == "-o: got 'plan.json', a full disk. Make room."
    assert capsys.readouterr() == ("the plan\n", f"saved {good}\n")


@pytest.mark.parametrize("words", [["--json"], []])
def test_a_plan_that_cannot_be_saved_is_printed(write, words):  # noqa: F811
    write(STEP)
    code, out, err = run("plan", "train.py:make", "-o", "/dev/full", *words)
    assert code == 2
    assert json.loads(out)["format"] if words else "train_step" in out
    assert err.endswith(
        "error: -o: got '/dev/full', which cannot be written (No space left on "
        "device). Give a file in a folder that exists and may be written to.\n"
    )


@pytest.mark.slow
def test_a_reader_that_leaves_gets_no_traceback():
    words = [sys.executable, "-m", "stowax", "targets", "--json"]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == 2
    assert "Traceback" not in said
    assert "BrokenPipe" not in said


@pytest.mark.slow
def test_a_closed_stdout_is_no_error():
    done = subprocess.run(
        ["/bin/sh", "-c", '"$0" -m stowax targets >&-', sys.executable],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_an_audit_that_nobody_reads_is_told_on_stderr(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(LOOP.replace("print(float(loss))", "float(loss)"))
    words = [sys.executable, "-m", "stowax", "audit", str(script)]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == 1
    assert "host-read" in said
    assert "Traceback" not in said


WAITS = """
    import os, pathlib, signal, stowax
    from stowax import _files

    def make():
        with _files.scratch_folder("stowax-test-") as folder:
            pathlib.Path("folder").write_text(folder)
            os.kill(os.getpid(), signal.SIGINT)
            print("not reached")
"""


def test_an_interrupt_ends_a_command_and_leaves_nothing(write):  # noqa: F811
    folder = write(WAITS).parent
    words = [sys.executable, "-m", "stowax", "plan", "train.py:make"]
    done = subprocess.run(
        words, cwd=folder, env=USUAL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 130
    assert done.stderr.endswith("interrupted\n")
    assert "Traceback" not in done.stderr
    assert not pathlib.Path((folder / "folder").read_text()).exists()


COMPILES = """
    import ctypes, os, signal, threading

    def make():
        # Stands in for a compile: C++ that no signal wakes up.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        ctypes.CDLL(None).sleep(300)
"""


@pytest.mark.slow
def test_an_interrupt_does_not_wait_for_a_compile(write):  # noqa: F811
    folder = write(COMPILES).parent
    words = [sys.executable, "-m", "stowax", "plan", "train.py:make"]
    done = subprocess.run(
        words, cwd=folder, env=USUAL, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 130
    assert done.stderr.endswith("interrupted\n")


FITS = """
    import os, signal
    import jax, jax.numpy as jnp

    def make_of_batch(batch):
        if batch > 8:
            os.kill(os.getpid(), signal.SIG)
        def step(w, x):
            return w - jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, "float32")
        return jax.jit(step), (shape(64, 64), shape(batch, 64))
"""


@pytest.mark.quick("SIGINT-130-interrupted")
@pytest.mark.parametrize(
    ("name", "code", "word"),
    [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")],
)
def test_an_interrupt_of_fit_shows_what_is_known_by_then(
    write,  # noqa: F811
    name,
    code,
    word,
):
    folder = write(FITS.replace("signal.SIG)", f"signal.{name})")).parent
    words = [sys.executable, "-m", "stowax", "fit", "train.py:make_of_batch"]
    done = subprocess.run(
        words, cwd=folder, env=USUAL, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (code, "")
    said = done.stderr.splitlines()
    assert "batch 8: tracing and predicting" in said
    assert "So far nothing was compiled that fits." in said
    rows = [line.split()[:3] for line in said]
    assert ["8", "as", "written"] in rows
    assert "Interrupted after" in done.stderr
    assert said[-1] == word


@pytest.mark.quick("run")
@pytest.mark.parametrize("command", ["run", "audit"])
def test_a_script_gets_an_interrupt_as_from_python(write, command):  # noqa: F811
    folder = write("""
        import atexit, os, signal
        atexit.register(print, "at exit")
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            print("saving")
        os.kill(os.getpid(), signal.SIGINT)
    """).parent
    words = [sys.executable, "-m", "stowax", command, "train.py"]
    done = subprocess.run(
        words, cwd=folder, env=USUAL, capture_output=True, text=True, check=False
    )
    said = done.stdout.splitlines()
    assert (done.returncode, said[0], said[-1]) == (130, "saving", "at exit")
    assert "Traceback" not in done.stderr
