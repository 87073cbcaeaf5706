"""What `mkdocs.yml` cannot say: where the site differs from the folder of Markdown.

The pages stay readable where they lie, and nothing of them is written twice. So the
home page is the repository's README, what lies beside `docs/` becomes a page of the
site, links lead to the same places, and the tutorial's notebooks and the gallery's
pages are put beside their Markdown. Example scripts can be downloaded, and stand as a
whole where a page says so.
"""

import importlib.util
import json
import pathlib
import posixpath
import re
import sys

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, InclusionLevel
from pymdownx.slugs import slugify

ROOT = pathlib.Path(__file__).resolve().parents[2]
GALLERY = ROOT / "build" / "gallery"

BESIDE = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "LICENSE": "LICENSE.txt",
}
"""Files beside `docs/`, and what they are called in the site."""

EXAMPLES = [
    path.relative_to(ROOT).as_posix()
    for path in sorted((ROOT / "examples").rglob("*.py"))
]
"""Scripts, which are called in the site what they are called in the repository."""

HOME = "README.md"
_SITE = {
    HOME: f"docs/{HOME}",
    **{name: f"docs/{page}" for name, page in BESIDE.items()},
    **{name: f"docs/{name}" for name in EXAMPLES},
}
_WHOLE = re.compile(r"^<!-- whole: (\S+) -->$", re.MULTILINE)
_LINK = re.compile(r"(\]\()([^()\s]+)(\))")
_ELSEWHERE = re.compile(r"[a-z]+:|#|/")


def on_config(config):
    """Headings get the anchors that repository viewers give them."""
    slugs = {"slugify": slugify(case="lower")}
    config.mdx_configs.setdefault("toc", {}).update(slugs)
    return config


def on_files(files, *, config):
    """Adds what lies beside `docs/`, the notebooks and the gallery's pages."""
    for name, page in BESIDE.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    for name, text in notebooks().items():
        files.append(File.generated(config, f"tutorial/{name}", content=text))
    for name in EXAMPLES:
        text = (ROOT / name).read_text()
        kept = InclusionLevel.INCLUDED
        files.append(File.generated(config, name, content=text, inclusion=kept))
    for path in sorted(GALLERY.glob("*.html")):
        name = f"howto/gallery/{path.name}"
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, *, page, **_):
    """The home page's text, and links as the site has them."""
    place = page.file.src_uri
    origin = {to: name for name, to in BESIDE.items()}.get(place, f"docs/{place}")
    if place == HOME:
        markdown, origin = (ROOT / HOME).read_text(), HOME
    elif re.fullmatch(r"tutorial/\d-.*\.md", place):
        markdown = with_downloads(markdown, pathlib.PurePosixPath(place).stem)
    return with_scripts(rewritten(markdown, origin, f"docs/{place}"))


def rewritten(markdown, origin, place):
    """Links of the file `origin`, as they have to be in the page at `place`.

    Both are paths from the root of the repository.

    >>> rewritten("[why](docs/trust.md#b)", "README.md", "docs/README.md")
    '[why](trust.md#b)'
    >>> rewritten("[what](../CHANGELOG.md)", "docs/a/b.md", "docs/a/b.md")
    '[what](../changelog.md)'
    """

    def there(link):
        path, mark, anchor = link[2].partition("#")
        if not path or _ELSEWHERE.match(path):
            return link[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
        target = _SITE.get(target, target)
        moved = posixpath.relpath(target, posixpath.dirname(place))
        return link[1] + moved + mark + anchor + link[3]

    return _LINK.sub(there, markdown)


def with_scripts(markdown):
    """A page with each script that a comment in it names: `<!-- whole: a/b.py -->`."""

    def whole(comment):
        return f"```py\n{(ROOT / comment[1]).read_text()}```"

    return _WHOLE.sub(whole, markdown)


def with_downloads(markdown, stem):
    """A page of the tutorial with its notebook offered below the title."""
    title, _, rest = markdown.partition("\n")
    files = f"[this page as a notebook]({stem}.ipynb)"
    if "from figures import" in rest:
        files += " and [figures.py](figures.py), which belongs beside it"
    return f"{title}\n\nDownload {files}.\n{rest}"


def notebooks():
    """Name -> text of the tutorial's notebooks; a wrong one ends the build."""
    import nbformat

    folder = ROOT / "docs" / "tutorial"
    sys.path.insert(0, str(folder))  # `run`, which knows a page's blocks
    maker = _loaded("tutorial_notebooks", folder / "notebooks.py")
    made = {}
    for path in sorted(folder.glob("[0-9]-*.md")):
        notebook = maker.notebook(path.read_text())
        try:
            nbformat.validate(notebook)
        except nbformat.ValidationError as error:
            raise PluginError(f"{path.name} makes no notebook: {error}") from error
        made[f"{path.stem}.ipynb"] = json.dumps(notebook, indent=1, ensure_ascii=False)
    return made


def _loaded(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
