"""How roles look, the same in every drawing, legend and table of a page.

Colours are those of Okabe and Ito, that people with colour-blindness tell apart, each
with a pattern of Bokeh's: no two roles share both, and neighbours share neither.
"""

from collections.abc import Mapping

from ._memory_bands import RESERVED

STYLES: Mapping[str, tuple[str, str]] = {
    "parameter": ("#0072B2", " "),
    "optimizer state": ("#56B4E9", "/"),
    "batch": ("#999999", "."),
    "argument": ("#0072B2", "-"),
    "output": ("#999999", "x"),
    "kept activation": ("#E69F00", " "),
    RESERVED: ("#F6E3B4", "x"),
    "offloaded": ("#CC79A7", " "),
    "offload in flight": ("#CC79A7", "\\"),
    "recomputed": ("#F0E442", "|"),
    "gradient": ("#009E73", "-"),
    "workspace": ("#D9D9D9", "."),
}

# A prediction has finer words: they look like what the compiled program has of them.
_FINER = {
    "activation": "kept activation",
    "activation gradient": "gradient",
    "logits": "workspace",
    "fragmentation": RESERVED,
}

# Bokeh's patterns as near as stylesheets come to them.
_STRIPES = {"/": "135deg", "\\": "45deg", "-": "180deg", "|": "90deg"}


def ink_on(colour: str) -> str:
    """Black or white, whichever reads better on a colour (WCAG's relative luminance).

    >>> ink_on("#0072B2"), ink_on("#E69F00")
    ('#ffffff', '#000000')
    """
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [
        p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts
    ]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#000000" if (luminance + 0.05) ** 2 > 1.05 * 0.05 else "#ffffff"


def swatch(role: str) -> str:
    """A small square as the role looks, as HTML; empty for what has no look.

    >>> swatch("parameter")
    '<span class="swatch" style="background-color:#0072B2"></span>'
    """
    style = background(role)
    return f'<span class="swatch" style="{style}"></span>' if style else ""


def background(role: str) -> str:
    """The colour and pattern of a role as CSS."""
    look = STYLES.get(_FINER.get(role, role))
    if look is None:
        return ""
    colour, pattern = look
    lines = "#0006 0 1px, transparent 1px 6px"
    images = [
        f"repeating-linear-gradient({angle}, {lines})"
        for sign, angle in _STRIPES.items()
        if sign == pattern or (pattern == "x" and sign in "/\\")
    ]
    if pattern == ".":
        dots = "radial-gradient(#0008 1px, transparent 1.5px)"
        return f"background:{dots} 0 0/5px 5px {colour}"
    image = f";background-image:{','.join(images)}" if images else ""
    return f"background-color:{colour}{image}"
