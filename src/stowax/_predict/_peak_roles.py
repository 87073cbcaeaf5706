"""What an array of a lowered program is for, and the line of the user's that makes it.

By data flow and by the names that JAX's transformations leave (`_scopes`). What no rule
knows is `workspace`. A loop's result is named after what its body writes into it: the
loop's own line says nothing.
"""

from collections.abc import Iterator, Mapping

from .._records._peak import PEAK_ROLES, PeakRole
from .._records._scopes import Phase, phase_of
from ._flatten import Block, Flat, Node
from ._fusion import FUSED, SLICES, short_name

_HANDED_ON = frozenset(
    ("broadcast_in_dim", "reshape", "transpose", "reverse", "custom_call", "copy")
)
_CAST = frozenset(("convert", "reshape", "transpose", "slice", "dynamic_slice"))
_PRODUCTS = frozenset(("dot_general", "convolution"))
_STEPS = 64  # from a value to what made it; more than any chain of names


class Roles:
    """The roles of a flattened program's values.

    **Arguments:** `given` has the roles of the program's arguments by number, `names`
    what they are called. `layers` is the named scope that planned layers are under.
    """

    def __init__(
        self,
        flat: Flat,
        given: Mapping[int, str],
        names: Mapping[int, str],
        layers: str = "",
    ):
        self.flat, self.given, self.names = flat, given, names
        self.again: set[int] = set()
        self.nodes = list(_nodes(flat.entry))
        self.makers: dict[int, tuple[Node, int]] = {}
        self.carried: dict[int, tuple[int, int]] = {}
        for node in self.nodes:
            for i, result in enumerate(node.results):
                self.makers[result] = node, i
            if short_name(node.name) == "while":
                body = node.blocks[1]
                pairs = zip(body.results, node.operands, strict=True)
                self.carried.update(zip(body.arguments, pairs, strict=True))
                if layers:
                    self.again.update(_recomputed(body, layers))
        shapes = [
            flat.values[n].shape for n, role in given.items() if role == "parameter"
        ]
        # A scan over layers takes one layer's part of a stacked parameter.
        cut = [shape[1:] for shape in shapes if len(shape) > 2]
        self.weights = {tuple(sorted(s)) for s in [*shapes, *cut] if len(s) > 1}
        self.logits = self._find_logits()
        self.logits_shapes = {flat.values[n].shape for n in self.logits}

    def role_of(self, value: int) -> PeakRole:
        """What a value is for."""
        origin = self.origin(value)
        for number in (value, origin):
            role = self.given.get(number)
            if role is not None:
                return role if role in PEAK_ROLES else "argument"
            if number in self.logits:
                return "logits"
        node = self.makers.get(origin, (None, 0))[0]
        phase = _phase(node) if node is not None else ""
        if phase == "forward" and origin in self.again:
            return "recomputed"
        if phase == "backward":
            shape = self.flat.values[value].shape
            if shape in self.logits_shapes:
                return "logits"
            sides = tuple(sorted(shape))
            return "gradient" if sides in self.weights else "activation gradient"
        if phase:
            return "activation" if phase == "forward" else "recomputed"
        return "workspace"

    def named(self, value: int) -> tuple[str, str]:
        """What a value is called (its operation with its scopes), and its line.

        Of an operation without a line (JAX's own functions, replayed) that of what it
        is computed from.
        """
        origin = self.origin(value)
        if origin in self.given:
            return f"copy of {self.names.get(origin) or 'an argument'}", ""
        node = self.makers.get(origin, (None, 0))[0]
        return (node.scope, self._line(node)) if node is not None else ("", "")

    def _line(self, node: Node) -> str:
        near, seen = [node], 0
        while near and seen < _STEPS:
            node, seen = near.pop(0), seen + 1
            if node.source:
                return node.source
            made = (self.makers.get(self.origin(n)) for n in node.operands)
            near += [maker[0] for maker in made if maker is not None]
        return ""

    def origin(self, value: int) -> int:
        """The value that says most about what lies in the place of `value`."""
        seen: set[int] = set()
        for _ in range(_STEPS):
            if value not in self.makers:
                if value not in self.carried:
                    return value  # an argument of the program
                # What a loop's body leaves for the next run; of what it hands on as it
                # is, what the loop begins with.
                made, first = self.carried[value]
                again = value in seen
                seen.add(value)
                value = first if again else made
                continue
            node, i = self.makers[value]
            short = short_name(node.name)
            if short == "while":
                inside = node.blocks[1].results[i]
                if inside == node.blocks[1].arguments[i]:
                    inside = node.operands[i]
                value = inside
            elif short == "dynamic_update_slice":
                value = node.operands[1]
            elif short in SLICES or self._hands_on(node, value):
                value = node.operands[0]
            else:
                return value
        return value

    def _hands_on(self, node: Node, value: int) -> bool:
        """Whether a value is its operand in another shape, byte for byte."""
        if short_name(node.name) not in _HANDED_ON or not node.operands:
            return False
        values = self.flat.values
        return values[node.operands[0]].bytes == values[value].bytes

    def _find_logits(self) -> set[int]:
        """Products with a parameter whose largest item is looked for, and their kin.

        A softmax over the last axis takes the largest item first, in JAX's own
        functions and in all that are safe from overflow.
        """
        product_of: dict[int, int] = {}
        found: set[int] = set()
        for node in self.nodes:
            short = short_name(node.name)
            if short in _PRODUCTS:
                if any(map(self._is_parameter, node.operands)):
                    product_of[node.results[0]] = node.results[0]
            elif short in FUSED:
                for number in node.operands:
                    alike = number in product_of and self._same_items(number, node)
                    if alike:
                        product_of[node.results[0]] = product_of[number]
            elif node.reducer == "stablehlo.maximum":
                number = node.operands[0]
                seen, made = node.seen[0].shape, self.flat.values[node.results[0]]
                if number in product_of and made.shape == seen[:-1]:
                    found.add(product_of[number])
        return {number for number, product in product_of.items() if product in found}

    def _same_items(self, number: int, node: Node) -> bool:
        values = self.flat.values
        before, after = values[number], values[node.results[0]]
        return before.bytes // max(before.item_bytes, 1) == after.bytes // max(
            after.item_bytes, 1
        )

    def _is_parameter(self, value: int) -> bool:
        """Whether a value is a parameter, or a part of one, at most cast and turned."""
        for _ in range(_STEPS):
            if value in self.given:
                return self.given[value] in ("parameter", "argument")
            if value not in self.makers:
                return False
            node, _ = self.makers[value]
            if short_name(node.name) not in _CAST or not node.operands:
                return False
            value = node.operands[0]
        return False


def _phase(node: Node) -> Phase:
    return phase_of(f"{node.within}/{node.scope}")


def _recomputed(body: Block, layers: str) -> Iterator[int]:
    """What the backward loop over planned layers makes of the forward pass."""
    own = [node for node in body.nodes if layers in node.scope]
    if any(_phase(node) == "backward" for node in own):
        for node in own:
            yield from node.results


def _nodes(block: Block) -> Iterator[Node]:
    """Every operation in the order in which they run, those of loops in their place."""
    for node in block.nodes:
        for inner in node.blocks:
            yield from _nodes(inner)
        yield node
