"""Runs pages such as those of the tutorial, and writes or checks what they print.

A page is Markdown. Its ```python blocks are executed from top to bottom in one
namespace; what a block prints belongs into the ```text block right below it.

    python docs/tutorial/run.py                  writes the outputs of every page
    python docs/tutorial/run.py --check 3-*.md   compares, and changes nothing

Text and whole numbers have to be equal. Numbers with a decimal point are figures: they
may differ by `TOLERANCE`, because every version of XLA lays memory out in its own way;
under `VERSION`, which wrote them, by `SAME_VERSION_TOLERANCE`.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse
import contextlib
import dataclasses
import io
import pathlib
import re
import sys

import jax

VERSION = "0.10.2"
"""The JAX that the committed outputs are those of."""

TOLERANCE = 0.20
SAME_VERSION_TOLERANCE = 0.01

FOLDER = pathlib.Path(__file__).resolve().parent
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$\n?", re.MULTILINE | re.DOTALL)
_FIGURE = re.compile(r"(\d+\.\d+)")
# The end of a plan: how long it took is another figure every time, and so may lines be.
_TOOK = re.compile(
    r"(compiled +\d+ programs? in) [\d.]+ m?s(.*?planned\s+in)\s+[\d.]+ m?s", re.DOTALL
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A ```python block, and the output that the page has for it.

    `line` is where its code begins, `start` and `end` the part of the page's text that
    its output takes (empty where it has none).
    """

    code: str
    line: int
    output: str
    start: int
    end: int


def pages():
    """Every page, in order."""
    return sorted(FOLDER.glob("[0-9]-*.md"))


def blocks(text):
    """The ```python blocks of a page."""
    fences = list(_FENCE.finditer(text))
    for fence, below in zip(fences, [*fences[1:], None], strict=True):
        if fence[1] != "python":
            continue
        start = end = fence.end()
        output = ""
        if below and below[1] == "text" and not text[end : below.start()].strip():
            output, end = below[2], below.end()
        line = text.count("\n", 0, fence.start(2)) + 1
        yield Block(code=fence[2], line=line, output=output, start=start, end=end)


def run(path):
    """What every block of a page prints, beside the block.

    An exception of the page's own is raised with the page's name and line.
    """
    text = path.read_text()
    namespace = {"__name__": path.stem}
    printed = []
    for block in blocks(text):
        # Empty lines in front: a traceback, and a plan, name the line of the page.
        source = "\n" * (block.line - 1) + block.code
        stream = io.StringIO()
        with contextlib.redirect_stdout(stream):
            exec(compile(source, path.name, "exec"), namespace)
        printed.append((block, stream.getvalue()))
    return printed


def written(text, printed):
    """A page's text with the outputs of `printed` in place of those it had."""
    for block, output in reversed(printed):
        below = f"\n```text\n{output}```\n" if output else ""
        text = text[: block.start] + below + text[block.end :]
    return text


def write(path):
    """Puts what a page prints now in place of what it had."""
    # What is printed may name a line of the page, and outputs above it move it: once
    # more, then.
    for _ in range(3):
        before = path.read_text()
        after = written(before, run(path))
        if _TOOK.sub(_timeless, after) == _TOOK.sub(_timeless, before):
            return
        path.write_text(after)


def differences(expected, got, tolerance):
    """Lines of `got` that are not what the page says, each beside what it says.

    >>> differences("a 4.00", "a  4.40", 0.2)
    []
    >>> differences("a 4.00", "b 4.00", 0.2)
    ["the page has 'a 4.00', the run 'b 4.00'"]
    """
    said, ran = (_TOOK.sub(_timeless, text).splitlines() for text in (expected, got))
    if len(said) != len(ran):
        return [f"the page has {len(said)} lines, the run {len(ran)}:\n{got}"]
    return [
        f"the page has {one!r}, the run {other!r}"
        for one, other in zip(said, ran, strict=True)
        if not _alike(" ".join(one.split()), " ".join(other.split()), tolerance)
    ]


def _timeless(took):
    return " ".join(f"{took[1]} …{took[2]} …".split())


def _alike(one, other, tolerance):
    # Every second part is a figure.
    said, ran = _FIGURE.split(one), _FIGURE.split(other)
    return said[::2] == ran[::2] and all(
        _near(a, b, tolerance) for a, b in zip(said[1::2], ran[1::2], strict=True)
    )


def _near(one, other, tolerance):
    """Within `tolerance`, or one unit of the last digit that is printed."""
    last_digit = 10.0 ** -len(one.partition(".")[2])
    difference = abs(float(one) - float(other))
    return difference <= max(tolerance * float(one), 1.01 * last_digit)


def check(path):
    """What is different in a page when it is run now; nothing where all is well."""
    tolerance = SAME_VERSION_TOLERANCE if jax.__version__ == VERSION else TOLERANCE
    return [
        f"{path.name}:{block.line}: {line}"
        for block, output in run(path)
        for line in differences(block.output, output, tolerance)
    ]


def main():
    """Writes or checks the outputs of the pages that are asked for."""
    parser = argparse.ArgumentParser(description="Runs the pages of the tutorial.")
    parser.add_argument("page", nargs="*", help="only these")
    parser.add_argument("--check", action="store_true", help="compare, change nothing")
    parser.add_argument(
        "--build", action="store_true", help=f"run; compare under JAX {VERSION} only"
    )
    options = parser.parse_args()
    paths = [pathlib.Path(page).resolve() for page in options.page] or pages()
    sys.path[:0] = {str(path.parent) for path in paths}  # what the pages import
    found = []
    if options.build and jax.__version__ != VERSION:
        for path in paths:
            run(path)
    elif options.check or options.build:
        found = [line for path in paths for line in check(path)]
    elif jax.__version__ != VERSION:
        found = [
            f"The outputs are those of JAX {VERSION}, and this is {jax.__version__}: "
            "write with that version, or change VERSION and the README first."
        ]
    else:
        for path in paths:
            write(path)
    print("\n".join(found), end="\n" * bool(found), file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
