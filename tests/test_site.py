"""The documentation site: every page is in it, and the how-to pages say what is so.

`make docs` builds it, and ends at a broken link; here is what that does not see.
"""

import ast
import importlib.util
import json
import pathlib
import re
import sys

import jax
import pytest
import yaml

import stowax
import stowax.integrations
import stowax.report
from stowax._errors import MissingExtraError
from updates import without_copies

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
HOWTO = sorted((DOCS / "howto").glob("*.md"))
PROGRAMS = [DOCS / "start.md", *HOWTO]
# `make docs` runs the gallery. The other two plan large steps, as test_tutorial.py
# does: `docs/tutorial/run.py --check docs/howto/*.md` has them.
_LONG = ("gallery", "several-hosts", "optimizer-state")
CHECKED = [path for path in PROGRAMS if path.stem not in _LONG]
TUTORIAL = DOCS / "tutorial"


@pytest.fixture
def pages(monkeypatch):
    """docs/tutorial/run.py, and what the pages import beside it."""
    for folder in (TUTORIAL, DOCS / "howto"):
        monkeypatch.syspath_prepend(folder)
    return module("tutorial_pages", TUTORIAL / "run.py")


def module(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made


def named(entries):
    """The paths in a navigation, in order."""
    for entry in entries:
        value = next(iter(entry.values())) if isinstance(entry, dict) else entry
        yield from named(value) if isinstance(value, list) else [value]


def configuration():
    return yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def test_every_page_is_in_the_navigation_once():
    there = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    beside = {"changelog.md", "contributing.md"}
    listed = list(named(configuration()["nav"]))
    assert sorted(listed) == sorted(there | beside)


def test_nothing_is_loaded_from_elsewhere():
    config = configuration()
    assert config["theme"]["font"] is False
    assert not any("://" in one for one in [*config["extra_css"], *config["hooks"]])
    assert "extra_javascript" not in config


def test_every_public_name_has_its_place_in_the_reference():
    texts = [path.read_text() for path in (DOCS / "api").glob("*.md")]
    described = re.findall(r"^::: (\S+)$", "\n".join(texts), re.MULTILINE)
    assert len(set(described)) == len(described)
    public = {f"stowax.{name}" for name in dir(stowax)}
    public |= {f"stowax.integrations.{name}" for name in stowax.integrations.__all__}
    source = pathlib.Path(stowax.report.__file__).read_text()
    exported = re.findall(r" import \w+ as (\w+)$", source, re.MULTILINE)
    public |= {f"stowax.report.{name}" for name in exported}
    public |= {
        f"stowax._errors.{name}"
        for name, one in vars(stowax._errors).items()
        if isinstance(one, type) and one is not stowax.StowaxError
    }
    assert public - set(described) == set()


def links(path):
    """Where a page's links lead in the repository, those of code left out."""
    text = re.sub(r"```.*?```|`[^`]*`", "", path.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:|#", target):
            yield path.parent / target.partition("#")[0]


def test_links_lead_somewhere_in_the_repository_too():
    of = {DOCS / "howto" / "gallery"}  # made by `make docs`
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")]:
        broken = [t for t in links(page) if not t.exists() and t.parent not in of]
        assert broken == [], page


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_howto_is_short_and_its_code_is_python(path):
    text = path.read_text()
    code = re.findall(r"^```py(?:thon)?\n(.*?)^```$", text, re.M | re.DOTALL)
    for block in code:
        ast.parse(block)
    assert text.startswith("# ")
    if path.stem not in ("README", "gallery"):
        assert code
        assert len(text.splitlines()) <= 160


@pytest.mark.slow
@pytest.mark.parametrize("path", CHECKED, ids=lambda path: path.stem)
@pytest.mark.usefixtures("usual_promotion", "full_effort")
def test_page_prints_what_it_says(path, pages, tmp_path, monkeypatch):
    if jax.default_backend() != "cpu" or jax.__version__ != pages.VERSION:
        pytest.skip(f"the outputs are those of a CPU and JAX {pages.VERSION}")
    monkeypatch.chdir(tmp_path)
    try:
        with without_copies():
            assert pages.check(path) == []
    except MissingExtraError as missing:
        pytest.skip(str(missing))


def test_how_long_it_took_may_differ(pages):
    said = "compiled    2 programs in 8.22 s: 15.5 GiB; planned in 14.64 s"
    ran = "compiled    2 programs in 910.5 ms: 15.5 GiB; planned in\n    21.10 s"
    assert pages.differences(said, ran, 0.01) == []
    assert pages.differences(said, ran.replace("15.5", "15.9"), 0.01) != []


def notebook(pages, name):
    maker = module("tutorial_notebooks", TUTORIAL / "notebooks.py")
    return maker.notebook((TUTORIAL / name).read_text())


def test_notebook_has_the_whole_page_in_its_order(pages):
    for path in pages.pages():
        made = notebook(pages, path.name)
        assert json.loads(json.dumps(made)) == made
        text = ""
        for cell in made["cells"]:
            source = cell["source"]
            if cell["cell_type"] == "code":
                source = f"```python\n{source}\n```"
                for output in cell["outputs"]:
                    source += f"\n\n```text\n{output['text']}```"
            text += f"{source}\n\n"
        assert text.split() == path.read_text().split()
        assert len({cell["id"] for cell in made["cells"]}) == len(made["cells"])
        assert {"markdown", "code"} == {cell["cell_type"] for cell in made["cells"]}


@pytest.mark.slow
@pytest.mark.usefixtures("usual_promotion", "full_effort")
def test_first_notebook_runs_and_prints_its_outputs(pages, capsys):
    if jax.default_backend() != "cpu" or jax.__version__ != pages.VERSION:
        pytest.skip(f"the outputs are those of a CPU and JAX {pages.VERSION}")
    names = {"__name__": "__main__"}
    code = [
        cell
        for cell in notebook(pages, "1-memory-kinds.md")["cells"]
        if cell["cell_type"] == "code"
    ]
    for cell in code:
        with without_copies():
            exec(cell["source"], names)
        said = "".join(output["text"] for output in cell["outputs"])
        ran = capsys.readouterr().out
        assert pages.differences(said, ran, pages.SAME_VERSION_TOLERANCE) == []
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]


def test_links_lead_to_the_same_place_in_the_site():
    pytest.importorskip("mkdocs", reason="the group docs is not installed")
    moved = module("site_hooks", DOCS / "site" / "hooks.py").rewritten
    home = ("README.md", "docs/README.md")
    page = ("docs/howto/a.md", "docs/howto/a.md")
    for text, origin, place, there in (
        ("[a](docs/trust.md#b)", *home, "[a](trust.md#b)"),
        ("[a](CHANGELOG.md) [b](LICENSE)", *home, "[a](changelog.md) [b](LICENSE.txt)"),
        ("[a](docs/README.md)", *home, "[a](README.md)"),
        ("[a](../../README.md)", *page, "[a](../README.md)"),
        ("[a](../guide.md#c)", *page, "[a](../guide.md#c)"),
        ("[a](#c) [b](https://x.org/y.md)", *page, "[a](#c) [b](https://x.org/y.md)"),
        ("[a](docs/b.md)", "CONTRIBUTING.md", "docs/contributing.md", "[a](b.md)"),
        ("[a](../../examples/ppo.py)", *page, "[a](../examples/ppo.py)"),
    ):
        assert moved(text, origin, place) == there


def test_scripts_stand_as_a_whole_on_their_pages():
    pytest.importorskip("mkdocs", reason="the group docs is not installed")
    hooks = module("site_hooks", DOCS / "site" / "hooks.py")
    named = []
    for page in sorted((DOCS / "integrations").glob("*.md")):
        names = re.findall(r"<!-- whole: (\S+) -->", page.read_text())
        named += names
        shown = hooks.with_scripts(page.read_text())
        assert all(f"```py\n{(ROOT / name).read_text()}```" in shown for name in names)
    scripts = {name for name in hooks.EXAMPLES if "/integrations/" in name}
    assert {*named} == scripts - {"examples/integrations/common.py"}


def test_docstring_examples_get_a_fence_and_fenced_ones_stay():
    pytest.importorskip("griffe", reason="the group docs is not installed")
    fenced = module("site_docstrings", DOCS / "site" / "docstrings.py").fenced
    text = "Adds.\n\n>>> 1 + 1\n2\n>>> 2 + 2\n4\n\nEnd."
    expected = "Adds.\n\n```pycon\n>>> 1 + 1\n2\n>>> 2 + 2\n4\n```\n\nEnd."
    assert fenced(text) == expected
    again = "So:\n\n```python\n>>> 1 + 1\n```\n"
    assert fenced(again) == again
