"""What a person calls the values of a layer.

A value is the result of an operation, and JAX names none. What a user knows is, in this
order: the name given with `checkpoint_name`; the part of the model, as Linen, Haiku and
Keras write it into JAX's name stack (`attention/query`), or as the classes tell it
whose `__call__` was running (NNX, Equinox, and whatever else is made of classes:
`MultiHeadAttention/LinearGeneral`); the function; and the line.

What goes silently wrong: the program of a stack is that of its first layer. What all of
its operations share (`GPT/Block_0`) is the layer, not a part of it, and is left out.
"""

import itertools
import pathlib
from collections.abc import Iterable
from typing import Any

from .. import _jax
from .._jaxprs._jaxpr import Program
from .._scopes import scopes_of


def value_names(program: Program) -> dict[int, str]:
    """A name per value that an operation makes: "mul gpt.py:12 in attention".

    Both ends of a `checkpoint_name` have the user's name alone.
    """
    equations = [node.equation for node in program.nodes]
    inside = _parts(equations)
    names: dict[int, str] = {}
    for node, part in zip(program.nodes, inside, strict=True):
        equation = node.equation
        if equation.primitive.name == "name":
            user = equation.params["name"]
            names[node.outputs[0]] = user
            for number in node.inputs:
                if number is not None:
                    names[number] = user
            continue
        where = _jax.source_line(equation)
        line = f" {pathlib.Path(where[0]).name}:{where[1]}" if where else ""
        part = part or (where[2].split(".")[-1] if where else "")
        suffix = f" in {part}" if part else ""
        for position, number in enumerate(node.outputs):
            which = f"[{position}]" if len(node.outputs) > 1 else ""
            names[number] = f"{equation.primitive.name}{which}{line}{suffix}"
    return names


def _parts(equations: Iterable[Any]) -> list[str]:
    """The part of the layer that each operation belongs to; empty where unknown."""
    equations = list(equations)
    paths = [scopes_of(_jax.name_stack(equation)) for equation in equations]
    classes = [_jax.calling_classes(equation) for equation in equations]
    if any(inside and not path for path, inside in zip(paths, classes, strict=True)):
        # Not every part writes its name there: Equinox's layers do, a user's do not.
        paths = classes
    known = [path for path in paths if path]
    alike = itertools.takewhile(
        lambda level: len(set(level)) == 1, zip(*known, strict=False)
    )
    shared = len(list(alike))
    # The layer itself: by its class, not by the number of the first one.
    layer = known[0][shared - 1].rstrip("0123456789").rstrip("_") if shared else ""
    return ["/".join(path[shared:]) or (layer if path else "") for path in paths]
