"""`stowax audit`: a script runs as Python would run it, and its loop is reported."""

import json
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
