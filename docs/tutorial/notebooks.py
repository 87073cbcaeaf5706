"""A page of the tutorial as a Jupyter notebook.

Text becomes Markdown cells; a ```python block becomes a code cell, and the ```text
block below it that cell's output. Nothing is run: the pages' outputs are true already
(`run.py`).
"""

import json
import pathlib
import sys

from run import blocks

_LANGUAGE = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def notebook(text):
    """A page's text as a notebook of format 4.5, in JSON types."""
    cells, at = [], 0
    for number, block in enumerate(blocks(text), start=1):
        begin = text.rindex("```python\n", 0, block.start)
        _add_text(cells, text[at:begin])
        cells.append(_code(block.code, block.output, number))
        at = block.end
    _add_text(cells, text[at:])
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    return {
        "cells": cells,
        "metadata": _LANGUAGE,
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def _add_text(cells, text):
    if text.strip():
        cells.append({"cell_type": "markdown", "metadata": {}, "source": text.strip()})


def _code(code, output, run):
    said = {"output_type": "stream", "name": "stdout", "text": output}
    return {
        "cell_type": "code",
        "execution_count": run,
        "metadata": {},
        "outputs": [said] if output else [],
        "source": code.removesuffix("\n"),
    }


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = pathlib.Path(name)
        made = json.dumps(notebook(path.read_text()), indent=1, ensure_ascii=False)
        path.with_suffix(".ipynb").write_text(made)
