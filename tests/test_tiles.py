"""Losses over large vocabularies in blocks of tokens: where, and the same numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import stowax
from planned_models import compiled_total, plan, spec
from planned_steps import assert_close
from stowax._errors import ArgumentError
from stowax._jaxprs._jaxpr import Program, inline
from stowax._jaxprs._lanes import lanes_of, on_blocks
from stowax._jaxprs._tiles import find_tiling, tiled

pytestmark = [pytest.mark.usefixtures("usual_promotion")]

B, T, D, V = 4, 256, 32, 256


def inputs(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (B, T, D), dtype)
    head = jax.random.normal(keys[1], (D, V), dtype) / D**0.5
    labels = jax.random.randint(keys[2], (B, T), 0, V)
    mask = jax.random.uniform(keys[3], (B, T)) > 0.2
    return x, head, labels, mask


# --- the losses that people write -----------------------------------------------------


def by_index(x, head, labels, mask):
    return optax.softmax_cross_entropy_with_integer_labels(x @ head, labels).mean()


def one_hot_masked(x, head, labels, mask):
    losses = optax.softmax_cross_entropy(x @ head, jax.nn.one_hot(labels, V))
    return (losses * mask).sum() / mask.sum()


def smoothed(x, head, labels, mask):
    wanted = jax.nn.one_hot(labels, V) * 0.9 + 0.1 / V
    return -(wanted * jax.nn.log_softmax(x @ head)).sum(-1).mean()


def shifted(x, head, labels, mask):
    logits = (x @ head)[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels[:, 1:]).mean()


def flat(x, head, labels, mask):
    logits = x.reshape(-1, D) @ head
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels.reshape(-1))
    return jnp.where(mask.reshape(-1), losses, 0).sum() / mask.sum()


def capped(x, head, labels, mask):
    """As Gemma's: a soft cap, a z-loss, weights, and the accuracy beside it."""
    logits = 30 * jnp.tanh(jnp.einsum("btd,dv->btv", x, head) / 30)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    label = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    losses = (log_z - label + 1e-4 * log_z**2) * mask
    right = (logits.argmax(-1) == labels).mean()
    return losses.sum() / jnp.maximum(mask.sum(), 1), right


def by_probability(x, head, labels, mask):
    p = jax.nn.softmax(x @ head)
    return -jnp.log(jnp.take_along_axis(p, labels[..., None], -1)).mean()


def distilled(x, head, labels, mask):
    taught = jax.lax.stop_gradient(x[:, 1:] @ head * 2)
    log_p, log_q = (jax.nn.log_softmax(z) for z in (taught, x[:, :-1] @ head))
    return (jnp.exp(log_p) * (log_p - log_q)).sum(-1).mean()


def head_first(x, head, labels, mask):
    """The head as the left operand, its bias and a temperature per token."""
    logits = jnp.einsum("vd,btd->btv", head.T, x) + jnp.arange(V) / V
    logits = logits / (1 + mask)[..., None]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum()


def per_example(x, head, labels, mask):
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ head, labels)
    return losses.mean(), losses


LOSSES = (
    *(by_index, one_hot_masked, smoothed, shifted, flat, capped, by_probability),
    *(distilled, head_first, per_example),
)


def over_tokens(x, head, labels, mask):
    """Tokens know of one another, and the words do not."""
    return jax.nn.log_softmax(x @ head, axis=(0, 1)).mean()


def mixed_tokens(x, head, labels, mask):
    logits = x @ head
    return (logits * jnp.roll(logits, 1, (0, 1))).mean()


def program_of(function, *args):
    return Program(inline(jax.make_jaxpr(function)(*args)))


def results(program, args):
    def loss(x, head):
        out = program.run(
            [o for o in program.outputs if isinstance(o, int)],
            dict(enumerate((x, head, *args[2:]))),
        )
        out = program.read_outputs(out, len(program.outputs))
        return out[0], out

    grads, out = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(*args[:2])
    return grads, out


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["f32", "bf16"])
def test_losses_in_blocks_are_the_losses(loss, dtype):
    args = inputs(dtype)
    program = program_of(loss, *args)
    found = find_tiling(program, 8)
    assert found.count == {shifted: 4, distilled: 5}.get(loss, 8)  # of 255 tokens
    blocks = tiled(program, found)
    largest = B * T * V // 2
    assert not any(
        aval.size > largest
        for node in blocks.nodes
        for aval in (blocks.avals[o] for o in node.outputs)
    )
    assert [str(v.aval) for v in blocks.jaxpr.jaxpr.outvars] == [
        str(v.aval) for v in program.jaxpr.jaxpr.outvars
    ]
    if dtype == jnp.float32:
        assert_close(results(blocks, args), results(program, args))
    else:  # sums of eight roundings
        got, expected = results(blocks, args), results(program, args)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
            a, b = (np.asarray(v, np.float32) for v in (a, b))
            np.testing.assert_allclose(a, b, atol=0.03 * np.abs(b).max())


@pytest.mark.parametrize("loss", [over_tokens, mixed_tokens], ids=lambda f: f.__name__)
def test_blocks_of_words_where_tokens_are_not_by_themselves(loss):
    args = inputs()
    program = program_of(loss, *args)
    found = find_tiling(program, 8)
    assert {number for number, _ in found.cut} == {1}
    assert_close(results(tiled(program, found), args), results(program, args))


# --- what stays as it is --------------------------------------------------------------


def returns_logits(x, head, labels, mask):
    logits = x @ head
    return logits.mean(), logits


def printed(x, head, labels, mask):
    logits = x @ head
    jax.debug.print("{}", logits.max())
    return jax.nn.logsumexp(logits, -1).mean()


def narrow(x, head, labels, mask):
    return jax.nn.logsumexp(x @ head[:, :D], -1).mean()


def over_all(x, head, labels, mask):
    return jax.nn.logsumexp(x @ head)


@pytest.mark.parametrize(
    "loss",
    [returns_logits, over_all, printed, narrow],
    ids=lambda loss: loss.__name__,
)
def test_what_is_no_such_loss_is_left_alone(loss):
    assert find_tiling(program_of(loss, *inputs()), 8) is None


def test_few_rows_are_left_alone():
    x, head, labels, mask = inputs()
    args = x[:1, :64], head, labels[:1, :64], mask[:1, :64]
    assert find_tiling(program_of(by_index, *args), 8) is None


def test_batches_over_devices_are_cut_along_tokens():
    mesh = jax.sharding.AbstractMesh((2,), ("data",))
    with jax.sharding.use_abstract_mesh(mesh):
        program = program_of(by_index, *inputs())
    axes = {axis for number, axis in find_tiling(program, 8).cut if number == 0}
    assert axes == {1}


# --- lanes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.concatenate([x, 2 * x], 1),
        lambda x: jnp.pad(x, ((0, 0), (1, 2), (0, 0))),
        lambda x: jnp.sort(x, 1),
        lambda x: jnp.cumsum(x, 2),
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
            equation = on_blocks(node.equation, lane, 2)
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
                    np.testing.assert_array_equal(jnp.concatenate(both, axis), whole)
    assert lanes


# --- plans ----------------------------------------------------------------------------

TOKENS, WIDTH, VOCABULARY, LAYERS = 8192, 128, 16384, 4


def loss_of(weights, tokens):
    x = weights["embedding"][tokens]

    def layer(x, w):
        return x + jnp.tanh(x @ w), None

    x, _ = jax.lax.scan(layer, x, weights["layers"])
    return by_index(x[None], weights["embedding"].T, tokens[None], None)


def train_step(weights, tokens):
    loss, grads = jax.value_and_grad(loss_of)(weights, tokens)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), loss


def arguments(make, tokens, vocabulary, width=WIDTH):
    weights = {
        "embedding": make(vocabulary, width),
        "layers": make(LAYERS, width, width),
    }
    return weights, spec(tokens, dtype=jnp.int32)


@functools.cache
def planned(target, percent, **wishes):
    args = arguments(spec, TOKENS, VOCABULARY)
    whole = plan(train_step, *args, target=target)
    budget = whole.device_bytes * percent // 100
    return whole, plan(train_step, *args, target=target, budget=budget, **wishes)


@pytest.mark.parametrize("target", ["h200", "v5p-8"])
def test_logits_are_not_in_the_peak(target):
    _, found = planned(target, 30)
    assert found.fits
    assert [s.count for s in found.program.stacks if s.tiles] == [8]
    args = arguments(spec, TOKENS, VOCABULARY)
    logits = 4 * TOKENS * VOCABULARY
    assert compiled_total(found, train_step, *args) < logits
    assert "8 blocks of tokens, one after the other" in " ".join(str(found).split())
    assert any("added up in another order" in note for note in found.proof.notes)
    assert "in 8 blocks of tokens" in found.as_code()


def test_a_plan_in_blocks_is_kept_in_a_file_and_computes_the_same(tmp_path):
    _, found = planned("h200", 30)
    found.save(tmp_path / "plan.json")
    read = stowax.load_plan(tmp_path / "plan.json")
    assert read.program.options.tiles == 8
    weights = {
        "embedding": jax.random.normal(jax.random.key(0), (VOCABULARY, WIDTH)) / 8,
        "layers": jax.random.normal(jax.random.key(1), (LAYERS, WIDTH, WIDTH)) / 16,
    }
    tokens = jax.random.randint(jax.random.key(2), (TOKENS,), 0, VOCABULARY)
    expected = jax.jit(train_step)(weights, tokens)
    assert_close(jax.jit(read.apply(train_step))(weights, tokens), expected)


def test_blocks_can_be_asked_for_and_forbidden():
    args = arguments(spec, TOKENS, VOCABULARY)
    found = plan(train_step, *args, pin={"*in by_index": "tile"})
    (pin,) = (p for p in found.pins if p.decision == "tile")
    assert pin.matched > 0
    assert any(stack.tiles for stack in found.program.stacks)
    forbidden = planned("h200", 30, forbid=("tile",))[1]
    assert not any(stack.tiles for stack in forbidden.program.stacks)
    assert not forbidden.fits
    assert forbidden.search.forbid == ("tile",)


def test_blocks_that_there_are_not():
    def step(w, x):
        return jax.grad(lambda w: jax.lax.scan(layer, x, w)[0].sum())(w)

    def layer(x, w):
        return jnp.tanh(x @ w), None

    with pytest.raises(ArgumentError) as caught:
        plan(step, spec(4, 64, 64), spec(256, 64), pin={"*tanh*": "tile"})
    assert "got 'tile', which is impossible for tanh test_tiles.py:" in str(
        caught.value
    )
    assert str(caught.value).endswith(
        "float32[256,64]: no product there is far larger than what it reads, with a "
        "loss that works token by token. Pin it to 'keep' or 'recompute', or leave the "
        "pin out."
    )
    with pytest.raises(ArgumentError, match="Write 'tile' alone"):
        plan(step, spec(4, 64, 64), spec(256, 64), forbid=("tile:*loss*",))
