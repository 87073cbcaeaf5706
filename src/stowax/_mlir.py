"""Reading the StableHLO that JAX lowers to; the only user of MLIR's Python bindings.

`read_graph(module)` copies the module, lets Shardy propagate the shardings in the copy
(milliseconds; the compiler would do the same first thing) and writes down what
`_lowered` has records for. The module itself stays as it was: it is still to be
compiled.

The bindings (`jaxlib.mlir`) are private to JAX. Served: JAX 0.10 to 0.12.
"""

import functools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

from jaxlib.mlir import ir as _ir
from jaxlib.mlir import passmanager as _passmanager
from jaxlib.mlir.dialects import sdy as _sdy
from jaxlib.mlir.dialects import stablehlo as _stablehlo

from ._records._lowered import (
    DTYPE_BYTES,
    Axes,
    Donation,
    Graph,
    Memory,
    Region,
    TensorOperation,
    TensorValue,
)
from ._where import line_in

_CALLS_AS_REGIONS = "builtin.module(sdy-import-func-calls)"
_PROPAGATION = "builtin.module(sdy-propagation-pipeline)"
_PLACEMENT = re.compile(r'_xla_buffer_placement\s*=\s*"([^"]*)"')
_KNOWN_TO_SHARDY = {1: "stablehlo.negate", 2: "stablehlo.add"}
_NAME = "stowax_name"


def read_graph(module: Any, *, sources: bool = False) -> Graph:
    """The records of a lowered module (`lowered.compiler_ir("stablehlo")`).

    **Arguments:** `module` is an MLIR module of StableHLO; it is not changed. With
    `sources` operations have the user's lines, whose text takes a while to make.
    """
    with module.context, _ir.Location.unknown(module.context):
        copy = module.operation.clone()
        body = copy.regions[0].blocks[0]
        meshes = [op for op in body.operations if op.operation.name == "sdy.mesh"]
        if meshes:
            try:
                _passmanager.PassManager.parse(_CALLS_AS_REGIONS).run(copy)
                _inline(copy, with_calls=sources)
                # Over one device it only takes half of the time of a prediction.
                if any(math.prod(_axes(m.operation).values()) > 1 for m in meshes):
                    _stand_in(copy)
                    _passmanager.PassManager.parse(_PROPAGATION).run(copy)
            except _ir.MLIRError:
                copy = module.operation.clone()
        return _Reader(copy, sources=sources).graph()


def _axes(mesh: Any) -> dict[str, int]:
    """The axes of a mesh by name, each with its number of devices."""
    axes = map(_sdy.MeshAxisAttr, _sdy.MeshAttr(mesh.attributes["mesh"]).axes)
    return {axis.name: axis.size for axis in axes}


def scopes(operation: Any) -> Iterator[str]:
    """Name stacks of an operation and of all in it, in order.

    They become the names of compiled instructions. The rest of a location, files and
    lines of a traceback, says who traced the program and not what it is.
    """
    yield _scope(operation)
    for inner in _inside(operation):
        yield from scopes(inner)


def _inside(operation: Any) -> list[Any]:
    """The operations in the blocks of an operation, as they are before any changes."""
    blocks = (block for region in operation.regions for block in region.blocks)
    return [view.operation for block in blocks for view in block.operations]


def _inline(operation: Any, *, with_calls: bool) -> None:
    """Puts the bodies of called functions in the place of the calls, as XLA does.

    Propagation over calls is another one: it decides in another order, and a batch that
    XLA splits over the devices comes out whole. Calls must have been made regions.
    """
    for op in _inside(operation):
        _inline(op, with_calls=with_calls)
        if op.name == "sdy.data_flow_edge":  # comes with the regions
            op.results[0].replace_all_uses_with(op.operands[0])
            op.erase()
            continue
        if op.name != "sdy.named_computation":
            continue
        body = op.regions[0].blocks[0]
        for argument, operand in zip(body.arguments, op.operands, strict=True):
            argument.replace_all_uses_with(operand)
        *inside, last = _inside(op)
        outer = _scope(op)
        for inner in inside:
            inner.move_before(op)
            _prefix(inner, outer, op.location if with_calls else None)
        for result, value in zip(op.results, last.operands, strict=True):
            result.replace_all_uses_with(value)
        op.erase()


def _stand_in(operation: Any) -> None:
    """Puts operations that Shardy knows in the place of CHLO's elementwise ones.

    XLA turns CHLO into StableHLO before it propagates, by a pass that the bindings do
    not have. Shardy itself has no rule for it, and nothing behind a square or an error
    function would be sharded. `_name` still has the operation's own name.
    """
    for op in _inside(operation):
        _stand_in(op)
        if not op.name.startswith("chlo."):
            continue
        known = _KNOWN_TO_SHARDY.get(len(op.operands))
        types = {str(value.type) for value in (*op.operands, *op.results)}
        one = len(op.results) == 1 and not len(op.regions)
        if not (one and known) or len(types) > 1:
            continue
        with _ir.InsertionPoint(op):
            stand_in = _ir.Operation.create(
                known,
                results=[op.results[0].type],
                operands=list(op.operands),
                attributes={_NAME: _ir.StringAttr.get(op.name)},
                loc=op.location,
            )
        op.results[0].replace_all_uses_with(stand_in.results[0])
        op.erase()


def _name(operation: Any) -> str:
    """The operation's own name, also where `_stand_in` has put another in its place."""
    attributes = operation.attributes
    if _NAME in attributes:
        return _ir.StringAttr(attributes[_NAME]).value
    return operation.name


def _scope(operation: Any) -> str:
    # Only a `NameLoc` has it. As text, a location is all of a traceback.
    return getattr(operation.location, "name_str", "")


def _prefix(operation: Any, outer: str, call: Any) -> None:
    """Puts the name stack of a call before those of the operations it stands for.

    The location of the call, if one is given, goes behind theirs: what JAX's own
    functions do is told by the line that calls them.
    """
    scope = _scope(operation)
    if outer and not scope.startswith(outer):
        name = f"{outer}/{scope}" if scope else outer
        both = call and _ir.Location.callsite(operation.location, [call])
        operation.location = _ir.Location.name(name, childLoc=both)
    for inner in _inside(operation):
        _prefix(inner, outer, call)


def _memory(kind: str | None) -> Memory | None:
    if kind is None:
        return None
    return "host" if "host" in kind else "device"


@functools.lru_cache(maxsize=4096)
def _tensor_type(text: str) -> tuple[tuple[int, ...], str, int]:
    """Shape, dtype, bytes per item of a type as MLIR prints it; a token has none."""
    match = re.fullmatch(r"tensor<((?:\d+x)*)([^,]+?)(?:, .*)?>", text)
    if match is None:
        return (), text, 0
    shape = tuple(int(n) for n in match.group(1).split("x")[:-1])
    dtype = match.group(2)
    if dtype in DTYPE_BYTES:
        return shape, dtype, DTYPE_BYTES[dtype]
    bits = re.search(r"\d+", dtype)
    item = -(-int(bits.group()) // 8) if bits else 4
    return shape, dtype, item * (2 if dtype.startswith("complex") else 1)


class _Reader:
    """Numbers the values of one module and writes its functions down."""

    def __init__(self, module: Any, *, sources: bool):
        self.module, self.sources = module, sources
        self.numbers: dict[Any, int] = {}
        self.types: dict[Any, tuple[tuple[int, ...], str, int]] = {}
        self.shardings: dict[Any, tuple[Axes, tuple[int, ...]]] = {}
        self.axis_sizes: dict[str, int] = {}

    def graph(self) -> Graph:
        functions = {}
        donations: tuple[Donation, ...] = ()
        result_memory: tuple[Memory, ...] = ()
        names: tuple[tuple[str, ...], ...] = ((), ())
        operations = [op.operation for op in self.module.regions[0].blocks[0]]
        for op in operations:
            if op.name == "sdy.mesh":
                self.axis_sizes |= _axes(op)
        for op in operations:
            if op.name != "func.func" or not len(op.regions[0].blocks):
                continue
            name = _ir.StringAttr(op.attributes["sym_name"]).value
            arguments, results = self.signature(op)
            functions[name] = self.region(
                op.regions[0], lambda i, given=arguments: given[i]
            )
            if name == "main":
                donations = tuple(
                    donation
                    for i, given in enumerate(arguments)
                    if (donation := _donation(i, given)) is not None
                )
                result_memory = tuple(
                    _memory(_text(given, "mhlo.memory_kind")) or "device"
                    for given in results
                )
                entry = op.regions[0].blocks[0].arguments
                names = (
                    tuple(getattr(value.location, "name_str", "") for value in entry),
                    tuple(_text(given, "jax.result_info") or "" for given in results),
                )
        return Graph(
            functions=functions,
            donations=donations,
            result_memory=result_memory,
            axis_sizes=self.axis_sizes,
            argument_names=names[0],
            result_names=names[1],
        )

    def signature(self, function: Any) -> tuple[list[Any], list[Any]]:
        """The attribute dictionaries of arguments and results."""
        attributes = function.attributes
        kind = _ir.FunctionType(_ir.TypeAttr(attributes["function_type"]).value)
        both = []
        for name, count in (
            ("arg_attrs", len(kind.inputs)),
            ("res_attrs", len(kind.results)),
        ):
            if name in attributes:
                both.append([_ir.DictAttr(a) for a in _ir.ArrayAttr(attributes[name])])
            else:
                both.append([{}] * count)
        return both[0], both[1]

    def region(self, region: Any, given: Callable[[int], Any] | None = None) -> Region:
        if not len(region.blocks) or not len(region.blocks[0].operations):
            return Region(arguments=(), operations=(), results=())
        block = region.blocks[0]
        arguments = tuple(
            self.value(argument, None, given(i) if given else {})
            for i, argument in enumerate(block.arguments)
        )
        *operations, last = [op.operation for op in block.operations]
        return Region(
            arguments=arguments,
            operations=tuple(self.operation(op) for op in operations),
            results=tuple(self.numbers[v] for v in last.operands),
        )

    def operation(self, op: Any) -> TensorOperation:
        attributes = op.attributes
        name = _name(op)
        per_value: list[Any] = []
        if "sdy.sharding" in attributes:
            per_value = list(
                _sdy.TensorShardingPerValueAttr(attributes["sdy.sharding"]).shardings
            )
        elif name in ("sdy.sharding_constraint", "sdy.reshard"):
            per_value = [attributes["sharding"]]
        elif "out_sharding" in attributes:  # Shardy's collectives
            per_value = [attributes["out_sharding"]]
        elif name == "sdy.manual_computation":
            per_value = list(
                _sdy.TensorShardingPerValueAttr(attributes["out_shardings"]).shardings
            )
        target, placement = _target(op)
        # A callback without results has a sharding all the same.
        there = len(per_value) == len(op.results)
        shardings = per_value if there else [None] * len(op.results)
        results = tuple(
            self.value(result, sharding, {}, placement)
            for result, sharding in zip(op.results, shardings, strict=True)
        )
        regions = tuple(
            self.region(region, _loop_argument(op)) for region in op.regions
        )
        return TensorOperation(
            name=name,
            operands=tuple(self.numbers[v] for v in op.operands),
            results=results,
            scope=_scope(op),
            source=line_in(str(op.location)) if self.sources else "",
            target=target,
            contracting=_contracting(op),
            regions=regions,
        )

    def value(
        self,
        value: Any,
        sharding: Any,
        given: Any,
        placement: Memory | None = None,
    ) -> TensorValue:
        number = self.numbers.setdefault(value, len(self.numbers))
        kind = value.type
        if kind not in self.types:
            self.types[kind] = _tensor_type(str(kind))
        shape, dtype, item = self.types[kind]
        if sharding is None and "sdy.sharding" in given:
            sharding = given["sdy.sharding"]
        axes, splits = self.sharding(sharding)
        return TensorValue(
            number=number,
            shape=shape,
            dtype=dtype,
            item_bytes=item,
            axes=axes if any(axes) else (),
            splits=splits if any(axes) else (),
            memory=placement or _memory(_text(given, "mhlo.memory_kind")),
        )

    def sharding(self, attribute: Any) -> tuple[Axes, tuple[int, ...]]:
        if attribute is None:
            return (), ()
        if attribute not in self.shardings:
            axes, splits = [], []
            for dimension in _sdy.TensorShardingAttr(attribute).dimension_shardings:
                refs = [
                    _sdy.AxisRefAttr(a)
                    for a in _sdy.DimensionShardingAttr(dimension).axes
                ]
                axes.append(tuple(ref.name for ref in refs))
                splits.append(math.prod(self.size(ref) for ref in refs))
            self.shardings[attribute] = tuple(axes), tuple(splits)
        return self.shardings[attribute]

    def size(self, ref: Any) -> int:
        """Parts that an axis, or a part of an axis such as `"x":(1)2`, makes."""
        part = ref.sub_axis_info
        if part is not None:
            return _sdy.SubAxisInfoAttr(part).size
        return self.axis_sizes.get(ref.name, 1)


def _text(given: Any, name: str) -> str | None:
    return _ir.StringAttr(given[name]).value if name in given else None


def _donation(argument: int, given: Any) -> Donation | None:
    if "tf.aliasing_output" in given:
        output = _ir.IntegerAttr(given["tf.aliasing_output"]).value
        return Donation(argument=argument, output=output)
    if "jax.buffer_donor" in given:
        return Donation(argument=argument, output=None)
    return None


def _target(op: Any) -> tuple[str, Memory | None]:
    """Callee or custom-call target, and where a placement puts its value."""
    attributes = op.attributes
    if op.name in ("func.call", "sdy.named_computation"):
        name = "callee" if op.name == "func.call" else "name"
        return str(attributes[name]).strip('@"'), None
    if op.name != "stablehlo.custom_call":
        return "", None
    target = _ir.StringAttr(attributes["call_target_name"]).value
    placement = None
    if target == "annotate_device_placement":
        found = _PLACEMENT.search(str(attributes["mhlo.frontend_attributes"]))
        placement = _memory(found.group(1) if found else None)
    return target, placement


def _contracting(op: Any) -> tuple[tuple[int, ...], ...]:
    if op.name != "stablehlo.dot_general":
        return ()
    numbers = _stablehlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
    left, right = numbers.lhs_contracting_dimensions, numbers.rhs_contracting_dimensions
    return tuple(left), tuple(right)


def _loop_argument(op: Any) -> Callable[[int], Any] | None:
    """Arguments of a loop's regions are sharded as its results are."""
    if op.name != "stablehlo.while" or "sdy.sharding" not in op.attributes:
        return None
    per_value = _sdy.TensorShardingPerValueAttr(op.attributes["sdy.sharding"]).shardings
    return lambda i: {"sdy.sharding": per_value[i]}
