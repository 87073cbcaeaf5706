"""Along which axes an operation works on blocks: shown by running it on halves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stowax._jaxprs._lanes import lanes_of, on_blocks
from tiled_losses import program_of


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.concatenate([x, 2 * x], 1),
        lambda x: jnp.pad(x, ((0, 0), (1, 2), (0, 0))),
        lambda x: jnp.sort(x, 1),
        lambda x: jnp.cumsum(x, 2),
        lambda x: jax.lax.top_k(x, 2)[0],
        lambda x: x[:, 1:3],
        lambda x: jnp.flip(x, 1),
        lambda x: x.transpose(2, 0, 1),
        lambda x: x.reshape(8, 24),
        lambda x: x.reshape(2, 4, 4, 6),
        lambda x: x.argmax(1),
        lambda x: x.sum((0, 2)),
        lambda x: x.max(0),
        lambda x: jnp.einsum("abc,adc->abd", x, x),
        lambda x: jnp.einsum("abc,dbc->ad", x, x),
        lambda x: x[..., 0],
        lambda x: x[jnp.array([0, 3, 1])],
        lambda x: jnp.take_along_axis(x, jnp.argmax(x, 2, keepdims=True), 2),
        lambda x: jnp.where(x > 0, x, jnp.arange(6.0)),
        lambda x: jnp.broadcast_to(x[:, :1], x.shape) + jnp.ones((8, 1, 6)),
    ],
)
def test_an_operation_on_blocks_makes_blocks_of_its_results(function):
    x = jax.random.normal(jax.random.key(1), (8, 4, 6))
    program = program_of(function, x)
    known = (
        program.run(
            [o for n in program.nodes for o in n.outputs], program.constants() | {0: x}
        )
        | {0: x}
        | program.constants()
    )
    lanes = 0
    for node in program.nodes:
        read, made = node.read(known), [known[o] for o in node.outputs]
        for lane in lanes_of(node.equation):
            sizes = [
                np.shape(v)[a]
                for v, a in zip([*read, *made], [*lane.ins, *lane.outs], strict=True)
                if a is not None
            ]
            if any(size % 2 for size in sizes):
                continue
            lanes += 1
            equation = on_blocks(node.equation, lane, 1, 2)
            halves = []
            for part in (0, 1):
                cut = [
                    v if a is None else jnp.split(jnp.asarray(v), 2, a)[part]
                    for v, a in zip(read, lane.ins, strict=True)
                ]
                params = equation.primitive.get_bind_params(equation.params)
                out = equation.primitive.bind(*cut, **params)
                halves.append(out if equation.primitive.multiple_results else [out])
            for k, (axis, whole) in enumerate(zip(lane.outs, made, strict=True)):
                both = [half[k] for half in halves]
                if lane.summed:
                    np.testing.assert_allclose(sum(both), whole, rtol=1e-4, atol=1e-5)
                elif axis is None:
                    np.testing.assert_array_equal(both[0], whole)
                else:
                    np.testing.assert_allclose(
                        jnp.concatenate(both, axis), whole, rtol=1e-5, atol=1e-5
                    )
    assert lanes
