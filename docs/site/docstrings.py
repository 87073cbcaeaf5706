"""Examples of docstrings, for mkdocstrings.

The house's docstrings are Markdown, but for one thing: a doctest has no fence around
it, and `>>>` quotes three times over in Markdown.
"""

import re

import griffe

_DOCTEST = re.compile(r"(?:^|(?<=\n))>>> .*(?:\n(?!\n|```).*)*")


def fenced(text):
    """A docstring with a fence around each doctest.

    >>> print(fenced("Adds.\\n\\n>>> 1 + 1\\n2\\n\\nNo more."))
    Adds.
    <BLANKLINE>
    ```pycon
    >>> 1 + 1
    2
    ```
    <BLANKLINE>
    No more.
    """
    parts = re.split(r"(```.*?```)", text, flags=re.DOTALL)
    parts[::2] = [_DOCTEST.sub(r"```pycon\n\g<0>\n```", part) for part in parts[::2]]
    return "".join(parts)


class Doctests(griffe.Extension):
    """Fences the examples of everything that is loaded."""

    def on_object(self, *, obj, **_):
        """Called once for each module, class, function and attribute."""
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)
