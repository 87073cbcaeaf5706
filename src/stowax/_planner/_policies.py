"""The policies that people write by hand, as decisions: what a plan is compared with.

Called by the plan's report, and by the search, which compiles those that promise to be
faster.
"""

from .._records._stages import Body, Decisions, Problem, Value
from ._baselines import baselines, named

_PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})


def policies(problem: Problem) -> dict[str, Decisions]:
    """The hand-written policies that a plan is compared with.

    JAX's own (`dots_saveable` and its kin) by the operation that made a value, and
    MaxText's by what the products of an attention block look like: three of equal width
    that read one input are taken for Q, K and V.
    """
    if not problem.bodies:
        return {}
    found = dict(baselines(problem))
    found["dots_saveable"] = named(problem, keep=_is_product)
    if any(_qkv(body) for body in problem.bodies):
        qkv = {body.name: _qkv(body) for body in problem.bodies}

        def is_qkv(body: Body, value: Value) -> bool:
            return value.index in qkv[body.name]

        found["save_qkv_proj"] = named(problem, keep=is_qkv)
        found["qkv_proj_offloaded"] = named(problem, offload=is_qkv)
        found["minimal_offloaded"] = named(problem, offload=_is_product)
    return found


def _is_product(body: Body, value: Value) -> bool:
    if value.operation is None:
        return False
    return body.operations[value.operation].primitive in _PRODUCTS


def _qkv(body: Body) -> frozenset[int]:
    """What follows the three products that read one input (or views of them)."""
    readers: dict[int, list[int]] = {}
    for operation in body.operations:
        if operation.primitive in _PRODUCTS and operation.inputs:
            readers.setdefault(operation.inputs[0], []).append(operation.index)
    for products in readers.values():
        if len(products) == 3:
            outputs = {o for p in products for o in body.operations[p].outputs}
            return frozenset(outputs | _views(body, outputs))
    return frozenset()


def _views(body: Body, values: set[int]) -> set[int]:
    views: set[int] = set()
    for operation in body.operations:
        if operation.primitive == "reshape" and operation.inputs[0] in values:
            views.update(operation.outputs)
    return views
