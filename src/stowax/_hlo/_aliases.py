"""Which arguments of a compiled program its results take the place of."""

from collections.abc import Iterator
from typing import Any

from .._records._program import HOST_SPACE


def aliased(module: Any) -> Iterator[int]:
    """Numbers of the arguments that outputs take the place of.

    Where there are very many, the compiler passes them as one tuple.
    """
    for alias in module.input_output_alias.entries:
        yield next(iter(alias.parameter_index), alias.parameter_number)


def crossing(module: Any) -> Iterator[int]:
    """Those of them that lie in another memory than the output.

    No program is to have any: the runtime takes an output for an array that lies where
    its type says, and the figures count it there.
    """
    shape = module.host_program_shape
    for alias in module.input_output_alias.entries:
        argument = _part(
            shape.parameters[alias.parameter_number], alias.parameter_index
        )
        output = _part(shape.result, alias.output_index)
        spaces = argument.layout.memory_space, output.layout.memory_space
        if (HOST_SPACE in spaces) and spaces[0] != spaces[1]:
            yield next(iter(alias.parameter_index), alias.parameter_number)


def _part(shape: Any, index: Any) -> Any:
    for number in index:
        shape = shape.tuple_shapes[number]
    return shape
