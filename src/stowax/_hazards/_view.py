"""One computation, asked where its values lie, who made them and who reads them."""

from collections.abc import Mapping

from .._records._program import Computation, Instruction

# What hands its operand on as it is.
_VIEWS = frozenset({"bitcast", "opt-barrier"})
# What waits for the result of something asynchronous.
_ENDS = ("-update", "-done")


class View:
    """A computation with positions and users by name."""

    def __init__(self, computation: Computation):
        self.items: Mapping[str, Instruction] = {
            item.name: item for item in computation.instructions
        }
        self.position = {name: index for index, name in enumerate(self.items)}
        self.users: dict[str, list[str]] = {}
        for item in computation.instructions:
            for operand in item.operands:
                self.users.setdefault(operand, []).append(item.name)

    @property
    def roots(self) -> list[Instruction]:
        """The tuples that nobody reads: what the computation returns is one of them."""
        return [
            item
            for item in self.items.values()
            if item.opcode == "tuple" and not self.users.get(item.name)
        ]

    def place(self, name: str) -> str:
        """The instruction that made a value where it lies, views of it passed over."""
        while name in self.items:
            item = self.items[name]
            inner = self.items.get(item.operands[0]) if item.operands else None
            if item.opcode in _VIEWS:
                name = item.operands[0]
            elif item.tuple_index is not None and inner and inner.opcode == "tuple":
                name = inner.operands[item.tuple_index]
            else:
                break
        return name

    def maker(self, name: str) -> Instruction:
        """What computed a value: of several results one, or asynchronously, too."""
        item = self.items[self.place(name)]
        while item.tuple_index is not None or item.opcode.endswith(_ENDS):
            item = self.items[self.place(item.operands[0])]
        return item

    def last_use(self, name: str) -> int:
        """Position of the last reader of a value, also through views of it."""
        last = self.position[name]
        for user in self.users.get(name, ()):
            item = self.items[user]
            if item.opcode in _VIEWS or item.opcode == "tuple":
                last = max(last, self.last_use(user))
            last = max(last, self.position[user])
        return len(self.items) if not self.users.get(name) else last
