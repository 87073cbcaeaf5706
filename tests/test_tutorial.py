"""Pages of docs/tutorial run, and print what they say.

They do so under the JAX that wrote the outputs; under any other they are skipped.
What the pages claim about figures stands in their tables, so it is held here too. The
last part plants changes and sees each of them caught.
"""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest

from stowax._errors import MissingExtraError
from updates import without_copies

pytestmark = pytest.mark.usefixtures("full_effort")

FOLDER = pathlib.Path(__file__).parents[1] / "docs" / "tutorial"


def load_runner():
    spec = importlib.util.spec_from_file_location("tutorial_run", FOLDER / "run.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks there
    spec.loader.exec_module(module)
    return module


tutorial = load_runner()
PAGES = [path.name for path in tutorial.pages()]
RUN = [name for name in PAGES if name[0] in "1236"]
"""The others, on parameters, do by hand what 3 and 6 do: `run.py --check` runs all."""


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
@pytest.mark.usefixtures("usual_promotion")
def test_page_prints_what_it_says(name, monkeypatch):
    if jax.default_backend() != "cpu":
        pytest.skip("the pages' outputs are those of a machine without accelerator")
    if jax.__version__ != tutorial.VERSION:  # listed by pytest -rs
        pytest.skip(f"the pages' outputs are those of JAX {tutorial.VERSION}")
    monkeypatch.syspath_prepend(FOLDER)
    try:
        with without_copies():
            different = tutorial.check(FOLDER / name)
    except MissingExtraError as missing:
        pytest.skip(str(missing))
    assert different == []


def test_every_page_is_listed_in_order_and_has_a_table():
    listed = re.findall(r"\]\((\d-[a-z-]+\.md)\)", (FOLDER / "README.md").read_text())
    assert listed == PAGES
    assert len(listed) == 6
    for name in PAGES:
        outputs = [b.output for b in tutorial.blocks((FOLDER / name).read_text())]
        heads = [o.split("\n")[0].split() for o in outputs if "v5p-8" in o]
        machines = ["cpu", "v5p-8", "h200"]
        assert any(head[1:4] == machines for head in heads), name


def test_readme_states_version_and_tolerances():
    text = " ".join((FOLDER / "README.md").read_text().split())
    assert f"The outputs are those of JAX {tutorial.VERSION}." in text
    assert f"{tutorial.SAME_VERSION_TOLERANCE:.0%}".replace("%", " %") in text
    assert f"{tutorial.TOLERANCE:.0%}".replace("%", " %") in text


def test_no_output_without_the_block_that_prints_it():
    for name in PAGES:
        text = (FOLDER / name).read_text()
        owned = sum(bool(block.output) for block in tutorial.blocks(text))
        assert owned == text.count("```text\n"), name


def test_donated_host_state_that_returns_on_the_device_ends_the_process():
    # What page 2 says but cannot show. Fails when JAX no longer does it: then say so.
    source = """if True:
        import jax
        host = jax.device_put(jax.numpy.ones((4, 4)), jax.memory.Space.Host)
        step = lambda x: jax.device_put(x, jax.memory.Space.Device) + 1
        print(jax.jit(step)(host).sharding.memory_kind, flush=True)
        jax.jit(step, donate_argnums=0)(host).sharding
        print("still there")
    """
    run = subprocess.run(
        [sys.executable, "-c", source],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout == "device\n"
    assert run.returncode < 0  # by a signal, not by an exception


# From here on the runner itself is checked.

PAGE = """# A page

```python
x = 2
print("total", f"{x:.2f}", "MiB of", x)
```

```text
total 2.00 MiB of 2
```

```console
$ not a block of its own
```

```python
print(x + 1)
```
"""


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "1-page.md"
    path.write_text(PAGE)
    return path


def test_outputs_are_written_below_their_blocks(page):
    tutorial.write(page)
    assert page.read_text() == PAGE + "\n```text\n3\n```\n"
    assert tutorial.check(page) == []


def test_output_that_is_no_longer_printed_goes(page):
    tutorial.write(page)
    page.write_text(page.read_text().replace("print(x + 1)", "x + 1"))
    assert tutorial.check(page) == [
        "1-page.md:17: the page has 1 lines, the run 0:\n",
    ]
    tutorial.write(page)
    assert page.read_text() == PAGE.replace("print(x + 1)", "x + 1")


def test_check_names_the_line_of_the_page_and_changes_nothing(page):
    page.write_text(PAGE.replace("2.00 MiB of", "2.60 MiB of"))
    before = page.read_text()
    first, second = tutorial.check(page)
    assert first.startswith("1-page.md:4: the page has 'total 2.60 MiB of 2', the run")
    assert second.startswith("1-page.md:17: the page has 0 lines, the run 1")
    assert page.read_text() == before


def test_what_a_page_raises_is_raised_with_its_line(page):
    page.write_text(PAGE.replace("print(x + 1)", "print(y)"))
    with pytest.raises(NameError) as error:
        tutorial.check(page)
    frame = error.traceback[-1]
    assert (str(frame.path), frame.lineno + 1) == ("1-page.md", 17)


@pytest.mark.parametrize(
    ("said", "ran", "tolerance", "same"),
    [
        ("a 4.00", "a    4.79", 0.20, True),
        ("a 4.00", "a 4.81", 0.20, False),
        ("a 4.00", "a 3.21", 0.20, True),
        ("a 4.00", "a 4.03", 0.01, True),
        ("a 4.00", "a 4.05", 0.01, False),
        ("a 0.01", "a 0.02", 0.01, True),  # one unit of the last digit
        ("a 0.00", "a 2.50", 0.20, False),  # nothing is on the host, or something is
        ("10 calls", "11 calls", 0.20, False),  # whole numbers are no figures
        ("float32<host>[2,4]", "float32[2,4]", 0.20, False),
        ("a 4.00 –", "a 4.00 4.00", 0.20, False),
        ("a\nb", "a", 0.20, False),
    ],
)
def test_figures_have_a_tolerance_and_nothing_else_has(said, ran, tolerance, same):
    assert (tutorial.differences(said, ran, tolerance) == []) == same
