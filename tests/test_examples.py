"""The examples in the docstrings run, and print what they say."""

import doctest
import importlib
import pathlib
import pkgutil

import jax
import jax.numpy as jnp
import pytest

import stowax

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(stowax.__path__, "stowax.")
    if not module.name.endswith("__main__")
)
NAMES = {
    "stowax": stowax,
    "jax": jax,
    "jnp": jnp,
}  # as a reader would have imported them
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def failures_of(module):
    """What the examples of `module` print where that is not what they say."""
    report = []
    runner = doctest.DocTestRunner(optionflags=OPTIONS, verbose=False)
    for test in doctest.DocTestFinder().find(module, extraglobs=NAMES):
        runner.run(test, out=report.append)
    return "".join(report)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stowax", *MODULES])
def test_examples_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # an example may write a file
    assert failures_of(importlib.import_module(name)) == ""


def test_every_file_is_looked_at():
    package = pathlib.Path(stowax.__file__).parent
    files = {path for path in package.rglob("*.py") if path.name != "__main__.py"}
    assert len(files) == len(["stowax", *MODULES])


def test_planted_wrong_example_is_caught(tmp_path, monkeypatch):
    (tmp_path / "planted_example.py").write_text('""">>> 1 + 1\n3\n"""\n')
    monkeypatch.syspath_prepend(tmp_path)
    said = failures_of(importlib.import_module("planted_example"))
    assert "Expected:\n    3\nGot:\n    2" in said
