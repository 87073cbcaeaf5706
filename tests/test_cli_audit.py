"""`stowax audit`: a script runs as Python would run it, and its loop is reported."""

import json
import os
import subprocess
import sys
import textwrap

import jax
import pytest
from click.testing import CliRunner

from stowax._cli._cli import main

LOOP = """
import sys
import jax, jax.numpy as jnp, numpy as np
step = jax.jit(lambda w, x: (w - x, jnp.sum(w * x)))
w = jnp.ones(4)
for k in range(4):
    w, loss = step(w, jnp.ones(4))
    print(float(loss))
"""
CLEAN = LOOP.replace("float(loss)", "k").replace("w, jnp.ones(4)", "w, w")


def in_a_process(folder, *words, **more):
    """`stowax audit`, as a shell runs it in a folder."""
    path = os.pathsep.join(map(os.path.abspath, sys.path))
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "stowax", "audit", *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        **more,
    )


@pytest.fixture
def audit(tmp_path):
    def run(source, *words, before=()):
        script = tmp_path / "train.py"
        script.write_text(textwrap.dedent(source))
        return CliRunner().invoke(main, ["audit", *before, str(script), *words])

    return run


def test_its_output_its_arguments_and_the_report(audit):
    found = audit("import sys\nprint(sys.argv[1:], __name__)\n" + LOOP, "--lr", "3")
    assert found.exit_code == 1
    assert found.stdout.startswith("['--lr', '3'] __main__\n4.0\n")
    assert "train.py:10: host-read (1 a step, 4 B" in found.stdout
    assert "auditing train.py" in found.stderr


@pytest.mark.slow
def test_a_clean_script_exits_with_0_and_allowed_is_clean(audit):
    found = audit(CLEAN)
    assert (found.exit_code, found.stdout[:8]) == (0, "0\n1\n2\n3\n")
    assert audit(LOOP, before=("--allow", "host-read:train.py")).exit_code == 0
    commented = LOOP.replace(
        "print(float(loss))", "float(loss)  # stowax: allow host-read"
    )
    assert audit(commented).exit_code == 0


@pytest.mark.parametrize("where", ["before", "after"])
def test_json_is_alone_on_stdout(audit, where, tmp_path):
    out = str(tmp_path / "audit.json")
    words = ("-o", out, "--json") if where == "before" else ("-o", out)
    found = audit(LOOP, *(["--json"] * (where == "after")), before=words)
    data = json.loads(found.stdout)
    assert [f["kind"] for f in data["findings"]] == ["host-read"]
    assert json.loads((tmp_path / "audit.json").read_text()) == data


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ends", "said", "clean", "faulty"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero", 2, 1),
        ("sys.exit('no more data')", "no more data", 2, 1),
        ("sys.exit(0)", "", 0, 1),
        ("raise KeyboardInterrupt", "interrupted", 130, 130),
    ],
)
def test_a_script_that_ends_early_is_reported(audit, ends, said, clean, faulty):
    for source, code in ((CLEAN, clean), (LOOP, faulty)):
        found = audit(source + ends)
        assert found.exit_code == code
        assert said in found.stderr
        assert "in 4 steps of" in found.stdout
        assert "_run_script" not in found.stderr
    if "1 / 0" in ends:
        assert 'train.py", line 9, in <module>' in found.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "fails",
    [
        "np.asarray(w, dtype='no')",
        "np.linalg.norm(w, ord='no')",
        "step(w, ('a', 'b'))",
        "(again := lambda: again())()",
    ],
)
def test_a_traceback_is_what_python_would_show(audit, fails):
    source = LOOP + f"try:\n    1 / 0\nexcept ZeroDivisionError:\n    {fails}\n"
    found = audit(source)
    assert 'train.py", line 12, in <module>' in found.stderr
    for own in ("_jax_hooks", "_numpy_hooks", "_run_script", "_cli"):
        assert own not in found.stderr


def test_a_donated_buffer_used_again_is_a_finding(audit):
    found = audit(
        """
        import jax, jax.numpy as jnp
        step = jax.jit(lambda w: w * 2, donate_argnums=0)
        w = jnp.ones(4)
        for _ in range(3):
            new = step(w)
        """
    )
    assert found.exit_code == 1
    assert "RuntimeError" in found.stderr or "ValueError" in found.stderr
    assert "train.py:6: donated-reuse" in found.stdout


def test_loops_in_threads_and_scripts_without_jax(audit):
    threaded = "import threading\ndef loop():\n"
    threaded += textwrap.indent(LOOP, "    ").replace("import sys", "pass")
    threaded += "\nthreading.Thread(target=loop).start()\n"
    assert "host-read" in audit(threaded).stdout
    found = audit("print(sum(map(int, input().split())) if 0 else 3)")
    assert (found.exit_code, found.stdout[:2]) == (0, "3\n")
    assert "No jitted function was called" in found.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("starts", "many"),
    [
        ("os.system('python3 -c 0')", 1),
        ("multiprocessing.get_context('spawn').Process(target=len).start()", 1),
        ("subprocess.run([sys.executable, '-c', ''])", 1),
        ("subprocess.run(['true'])", 0),
    ],
)
def test_processes_that_may_run_jax_are_told_of(audit, tmp_path, starts, many):
    script = (
        "import multiprocessing, os, subprocess, sys\nif __name__ == '__main__':\n    "
    )
    out = str(tmp_path / "audit.json")
    found = audit(script + starts, before=("-o", out))
    said = f"started other processes ({many}): those that run JAX were not looked at"
    assert (said in found.stdout) == bool(many)
    notes = json.loads((tmp_path / "audit.json").read_text())["notes"]
    assert (said in " ".join(notes)) == bool(many)


@pytest.mark.slow
def test_a_copy_of_the_process_ends_as_the_script_ends_it(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys\nimport jax\nchild = os.fork()\n"
        "if not child:\n    sys.exit(3)\n"
        "status = os.waitpid(child, 0)[1]\nprint(os.waitstatus_to_exitcode(status))\n"
    )
    found = in_a_process(tmp_path, "train.py")
    assert found.stdout.count("findings") == 1
    assert found.stdout.startswith("3\n")
    assert found.returncode == 0


def test_a_module_of_a_package_and_its_own_arguments(tmp_path, monkeypatch):
    package = tmp_path / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("RATE = 3")
    (package / "train.py").write_text(
        "import argparse\nfrom . import RATE\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('-o'); print(parser.parse_args(), RATE, __spec__.name)\n"
    )
    (package / "__main__.py").write_text("import sys; print(sys.argv, __package__)")
    monkeypatch.chdir(tmp_path)
    found = CliRunner().invoke(main, ["audit", "-m", "pack.train", "-o", "x"])
    assert found.stdout.startswith("Namespace(o='x') 3 pack.train\n")
    found = CliRunner().invoke(main, ["audit", "-m", "pack", "x"])
    assert found.stdout.startswith(f"['{package / '__main__.py'}', 'x'] pack\n")
    for name in ("pack.none", "none.train", "pack."):
        found = CliRunner().invoke(main, ["audit", "-m", name])
        assert found.exit_code == 2
        assert f"-m: got {name}" in found.stderr


def test_a_page_without_an_inspection(audit, tmp_path):
    page = tmp_path / "page.html"
    found = audit(LOOP, before=("--html", str(page), "--allow", "implicit-transfer"))
    assert found.exit_code == 1
    text = page.read_text()
    assert "<h1>1 finding in train.py:7</h1>" in text
    assert "host-read" in text
    assert "Read it every so many steps" in text
    audit(CLEAN, before=("--html", str(page)))
    assert "Nothing found." in page.read_text()


@pytest.mark.slow
def test_stdin_interrupts_and_code_without_a_file(tmp_path):
    """As a shell runs it: input is the script's, Ctrl-C prints the report so far.

    A shell has its background jobs ignore Ctrl-C; tests may be one.
    """
    script = tmp_path / "train.py"
    script.write_text(
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "code = open('loop.txt').read()\nprint(input())\n"
        "exec(compile(code, '<cell>', 'exec'))\nsignal.raise_signal(signal.SIGINT)\n"
    )
    (tmp_path / "loop.txt").write_text(LOOP)
    found = in_a_process(tmp_path, "train.py", input="three\n")
    assert found.stdout.startswith("three\n4.0\n")
    assert "<cell>:8: host-read" in found.stdout
    assert found.returncode == 130, found.stdout + found.stderr
    assert found.stderr.endswith("interrupted\n"), found.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "out"),
    [
        ("import os; os._exit(0)", None),
        ("import io, sys; sys.stdout = io.StringIO(); sys.stdout.close()", None),
        ("import sys; sys.stdout.close()", "stderr"),
    ],
)
def test_a_script_that_leaves_or_closes_its_output_is_reported(tmp_path, end, out):
    (tmp_path / "train.py").write_text(LOOP + end)
    found = in_a_process(tmp_path, "-o", "a.json", "train.py")
    assert found.returncode == 1
    assert "host-read" in getattr(found, out or "stdout")
    kinds = [
        f["kind"] for f in json.loads((tmp_path / "a.json").read_text())["findings"]
    ]
    # On a machine that is busy the device may well be said to wait for its host.
    assert [kind for kind in kinds if kind != "starved-device"] == ["host-read"]


def test_an_audit_within_an_audit(audit):
    inner = "import stowax\nwith stowax.audit() as inside:\n" + textwrap.indent(
        LOOP, "    "
    )
    found = audit(inner + "\nprint([f.kind for f in inside.findings])")
    assert "['host-read']" in found.stdout
    assert "train.py:10: host-read" in found.stdout


def test_after_its_steps_it_reports_and_the_script_goes_on(audit):
    found = audit(LOOP + "print('the end')", before=("--steps", "2"))
    assert "in 2 steps of" in found.stdout
    assert found.stdout.index("in 2 steps of") < found.stdout.index("the end")


def test_variables_of_jax_hold_that_the_script_sets(audit, monkeypatch):
    # What the script sets is in this process: taken back, or programs that later tests
    # start would have it too.
    monkeypatch.setenv("JAX_ENABLE_X64", "0")
    before = jax.config.read("jax_enable_x64")
    try:
        found = audit(
            "import os\nos.environ['JAX_ENABLE_X64'] = '1'\n"
            "import jax.numpy as jnp\nprint(jnp.ones(2).dtype)"
        )
    finally:
        jax.config.update("jax_enable_x64", before)
    assert found.stdout.startswith("float64")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.py"], "SCRIPT.py: got nowhere.py, no such file."),
        (
            ["--allow", "host-raed", "x.py"],
            "--allow: got 'host-raed'. Write KIND[:FILE]",
        ),
        (["--steps", "1", "x.py"], "--steps: got 1."),
        (["-o", "no/where.json", "x.py"], "-o: got"),
        (["broken.py"], "broken.py:1"),
    ],
)
def test_what_cannot_run_says_so(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text("print('ran')")
    (tmp_path / "broken.py").write_text("for")
    found = CliRunner().invoke(main, ["audit", *words])
    assert found.exit_code == 2
    assert said in found.stderr
    assert "ran" not in found.stdout
