"""What may as well run inside of a loop over blocks: what leads up to it.

A gradient times the clip factor is an array of its own if it is made before the loop.
Made inside, of the gradient's block, it is none.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from .._cost._record import bytes_of
from .._jaxprs._jaxpr import Program
from ._feed import view_of
from ._kinds import elementwise, inputs_of, shape_of, worked_shape
from ._levels import Levels


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lead:
    """What has to be known of a program to find the lead to a loop.

    `on_device` are outputs of the step, `hosted` gradients in host memory.
    """

    program: Program
    users: Mapping[int, Sequence[int]]
    levels: Levels
    on_device: Collection[int]
    hosted: Collection[int]

    def extended(self, part: Sequence[int], level: int) -> list[int]:
        """`part`, of that level, and what leads up to it and had better run on blocks.

        A whole array is saved wherever its maker can run inside, on arrays that are
        there anyway (those of the loop, and inputs of the step), or on one in its
        place. What others use as well exists anyhow: it is made a second time only if
        that needs no other array.
        """
        mine = set(part)
        shape = worked_shape(self.program, self.program.nodes[part[0]])
        while True:
            inputs = set(inputs_of(self.program, sorted(mine)))
            for number in sorted(inputs, reverse=True):
                # Smaller arrays are broadcast in the loop, and made before it.
                if shape_of(self.program, number) != shape:
                    continue
                lead = self._lead_to(number, mine, inputs, level)
                if lead:
                    mine |= lead
                    break
            else:
                return sorted(mine)

    def _again(self, position: int, level: int) -> bool:
        """Whether what an earlier loop did can be done again at `level`.

        What it is made of has to be there still: leaves that no loop before that wrote
        over, gradients, what is on the device. Then nothing waits between two loops.
        """
        member, written = self.levels.member, self.levels.written
        if member[position] >= level:
            return False
        for number in self.program.nodes[position].inputs:
            if number is None or number in self.hosted:
                continue
            if number in written:
                if written[number] < level:
                    return False
                continue
            maker = self.program.maker.get(number)
            if maker is None or maker not in member:
                continue
            if shape_of(self.program, number) == ():
                continue  # a total stays
            if not self._again(maker, level):
                return False
        return True

    def _lead_to(
        self, number: int, mine: set[int], inputs: set[int], level: int
    ) -> set[int]:
        """Nodes that make `number` and may as well run inside; none if that costs."""
        shape, maker = shape_of(self.program, number), self.program.maker
        member, values = self.levels.member, self.levels.value

        def inside(value: int) -> bool:
            position = maker.get(value)
            return (
                position is not None
                and value not in self.hosted
                and (position not in member or self._again(position, level))
                and shape_of(self.program, value) == shape
                and values[value] <= level
                and elementwise(self.program, self.program.nodes[position])
            )

        def alone(value: int, nodes: set[int]) -> bool:
            return nodes.issuperset(self.users[value]) and value not in self.on_device

        if not inside(number):
            return set()
        lead = {maker[number]}
        while True:
            read = set(inputs_of(self.program, sorted(lead)))
            more = {
                v
                for v in read
                if inside(v) and (maker[v] in member or alone(v, mine | lead))
            }
            if not more:
                break
            lead |= {maker[v] for v in more}
        new = sum(
            bytes_of(self.program.avals[v])
            for v in read - inputs
            if shape_of(self.program, v) == shape
            and v >= self.program.input_count
            and v not in self.hosted
            and view_of(self.program, v) is None
        )
        saved = bytes_of(self.program.avals[number]) if alone(number, mine) else 0
        return lead if new <= saved else set()
