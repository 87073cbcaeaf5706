"""What `import stowax` may load: no JAX, not the frameworks, not the solver.

A training script pays for an import on every host, and a backend that starts early
takes the user's chance to configure it. Each check runs in a process of its own, and
the last tests plant what is forbidden and see it caught.
"""

import json
import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

import stowax

# Optional frameworks act only if already loaded; plotting, reading protocol buffers and
# solving are loaded by the functions that need them.
HEAVY = (
    "bokeh",
    "equinox",
    "flax",
    "google.protobuf",
    "highspy",
    "jax",
    "matplotlib",
    "optax",
    "orbax",
    "plotly",
    "scipy.optimize",
    "stowax._cli._cli",
)

PROBE = """
import json, sys
import {module}
loaded = [name for name in {heavy!r} if name in sys.modules]
bridge = sys.modules.get("jax._src.xla_bridge")
print(json.dumps([loaded, bool(bridge and bridge.backends_are_initialized())]))
"""


def probe(module, *folders):
    """Which of HEAVY importing `module` loads, and whether it starts a JAX backend."""
    paths = [*map(str, folders), os.environ.get("PYTHONPATH", "")]
    result = subprocess.run(
        [sys.executable, "-c", PROBE.format(module=module, heavy=HEAVY)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    loaded, backend = json.loads(result.stdout.splitlines()[-1])
    return loaded, backend


def test_import_is_light_and_starts_no_backend():
    loaded, backend = probe("stowax", pathlib.Path(stowax.__file__).parents[1])
    assert loaded == []
    assert not backend


def test_the_command_starts_without_jax_and_without_noise():
    """A JAX with CUDA's plugin logs warnings as soon as it is imported."""
    code = (
        "import sys; from stowax._cli._cli import main\n"
        "try: main(['plan', '--help'])\n"
        "except SystemExit: print('jax' in sys.modules)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
    run = [sys.executable, "-c", code]
    result = subprocess.run(run, env=environment, capture_output=True, text=True)
    assert result.stdout.splitlines()[-1] == "False"
    assert result.stderr == ""


@pytest.mark.parametrize("heavy", ["optax", "google.protobuf"])
def test_planted_import_is_caught(tmp_path, heavy):
    package = tmp_path / "planted"
    package.mkdir()
    (package / "__init__.py").write_text("from . import _inner\n")
    (package / "_inner.py").write_text(f"import {heavy}\n")
    if heavy == "optax":  # a stand-in: only the name counts
        (tmp_path / "optax.py").write_text("")
    assert probe("planted", tmp_path) == ([heavy], False)


def test_planted_backend_is_caught(tmp_path):
    code = """
        import jax
        jax.devices()
    """
    (tmp_path / "planted.py").write_text(textwrap.dedent(code))
    assert probe("planted", tmp_path) == (["jax"], True)


def test_a_command_that_imports_jax_adds_nothing_to_what_it_says():
    code = "from stowax._cli._cli import main; main(['targets'])"
    environment = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
    environment.pop("JAX_PLATFORMS", None)
    run = [sys.executable, "-c", code]
    result = subprocess.run(run, env=environment, capture_output=True, text=True)
    assert "h200" in result.stdout
    assert result.stderr == ""
