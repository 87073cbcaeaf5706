"""Which named values of a lowered program take no memory: computed where they are read.

In straight-line code the compiler decides what becomes an array: of a chain of
elementwise operations only what a product or a loop reads. To "keep" another value of
the chain says nothing. `virtual_scopes` asks the rules that predict memory (`_fusion`).
A product that a TPU consumes where it computes it is none of these: it costs time.
"""

import re

from .._records._lowered import Graph
from ._flatten import Block, Node, flatten
from ._fusion import FUSED, GPU_RULES, TPU_RULES, Fusion, short_name


def virtual_scopes(
    graph: Graph, platform: str, scopes: re.Pattern[str]
) -> dict[str, bool]:
    """By named scope, whether the value that it makes is no array.

    **Arguments:** `scopes` meets the scopes that are asked for, in its first group;
    each makes one value, by its last operation; of several layers the last speaks.

    **Returns:** scopes of which operations are left; a change of shape alone leaves
    none.
    """
    flat = flatten(graph)
    rules = TPU_RULES if platform == "tpu" else GPU_RULES
    fusion = Fusion(flat, rules, flat.entry)
    last: dict[str, list[Node]] = {}
    for node, scope in _scoped(flat.entry, scopes):
        last.setdefault(scope, []).append(node)
    return {
        scope: short_name(nodes[-1].name) in FUSED
        and not any(fusion.has_buffer(r) for r in nodes[-1].results)
        for scope, nodes in last.items()
    }


def _scoped(block: Block, scopes: re.Pattern[str]) -> list[tuple[Node, str]]:
    """The block's own operations that stand in a scope, but for transposed ones."""
    found = []
    for node in block.nodes:
        match = scopes.search(node.scope)
        if match and "transpose(" not in node.scope[: match.start(1)]:
            found.append((node, match[1]))
    return found
