"""A plan as plain JAX code: it runs, stores what it says, and says what it cannot."""

import ast
import contextlib
import dataclasses
import io
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name, print_saved_residuals

import stowax
from plan_parts import changed
from report_records import PLAN
from stowax._plan._export import plan_as_code
from stowax._records._plan import DecisionRecord, StackRecord
from stowax._survey._options import plan_options

LAYERS, WIDTH, ROWS = 3, 8, 4
STACK = "0123abcd.0"


def decision(name, source, how, **fields):
    given = {
        "stack": STACK,
        "value": 0,
        "role": "activation",
        "shape": (ROWS, WIDTH),
        "dtype": "float32",
        "count": LAYERS,
        "bytes": ROWS * WIDTH * 4,
        "reason": "",
    }
    return DecisionRecord(name=name, source=source, decision=how, **{**given, **fields})


def plan(*decisions, unrolled=False, source="/home/me/model.py:30", stacks=True):
    stack = StackRecord(
        name=STACK,
        source=source,
        count=LAYERS,
        unrolled=unrolled,
        fingerprint="",
        forward_seconds=0.0,
        backward_seconds=0.0,
        forward_window_used=0.0,
        backward_window_used=0.0,
    )
    stacks = (stack,) if stacks else ()
    return changed(PLAN, decisions=decisions, stacks=stacks)


def run(code):
    namespace = {}
    exec(compile(code, "plan.py", "exec"), namespace)
    return namespace


FULL = (
    decision("layer input 0", "", "offload"),
    decision("dot_general model.py:11 in layer", "/home/me/model.py:11", "keep"),
    decision("dot_general model.py:11 in layer", "/home/me/model.py:11", "offload"),
    decision("tanh model.py:12 in layer", "/home/me/model.py:12", "recompute"),
    decision("gate", "/home/me/model.py:13", "keep"),
)


def layer(x, w):
    """The layer as the code's comments say to annotate it."""
    x = checkpoint_name(x, "model_30_input_0")
    a = checkpoint_name(x @ w, "model_11_dot_general")
    b = checkpoint_name(a @ w, "model_11_dot_general_2")
    return x + checkpoint_name(jnp.sin(jnp.tanh(b)), "gate") * jnp.cos(a)


def loss_of(body):
    def loss(ws, x):
        return jnp.mean(jax.lax.scan(lambda x, w: (body(x, w), None), x, ws)[0])

    return loss


def test_code_runs_and_gradients_are_equal():
    wrap = run(plan_as_code(plan(*FULL)))["checkpointed_model_30"]
    draw = np.random.default_rng(0)
    ws = jnp.asarray(draw.normal(size=(LAYERS, WIDTH, WIDTH)) / 3, jnp.float32)
    x = jnp.asarray(draw.normal(size=(ROWS, WIDTH)), jnp.float32)
    got = jax.jit(jax.value_and_grad(loss_of(wrap(layer))))(ws, x)
    expected = jax.jit(jax.value_and_grad(loss_of(layer)))(ws, x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        rounding = 64 * jnp.finfo(jnp.float32).eps * float(jnp.max(jnp.abs(b)))
        np.testing.assert_allclose(a, b, rtol=0, atol=rounding)


def test_code_saves_what_the_comments_name_and_nothing_else():
    wrap = run(plan_as_code(plan(*FULL)))["checkpointed_model_30"]
    x, w = jnp.ones((ROWS, WIDTH)), jnp.ones((WIDTH, WIDTH))
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        print_saved_residuals(lambda x, w: wrap(layer)(x, w).sum(), x, w)
    saved = set(re.findall(r"named '(\w+)'", out.getvalue()))
    assert saved <= {"gate", "model_11_dot_general"}
    assert "tanh" not in out.getvalue()
    # one f32[4,8] for each stored value, plus the weights and the layer's own input
    assert out.getvalue().count(f"[{ROWS},{WIDTH}]") <= 5


def test_comments_say_where_each_name_goes():
    code = plan_as_code(plan(*FULL))
    comments = [line for line in code.splitlines() if line.startswith("#")]
    text = "\n".join(comments)
    assert "first line of the layer" in text
    for name in ("model_30_input_0", "model_11_dot_general", "model_11_dot_general_2"):
        assert f'x = checkpoint_name(x, "{name}")' in text
    assert text.count("several values of this line are stored") == 1
    assert "'gate' (float32[4,8], keep) is in the model already" in text
    assert "tanh" not in text


def test_nothing_is_said_twice():
    product = decision(
        "dot_general model.py:11 in layer", "/home/me/model.py:11", "keep"
    )
    kernel = decision(
        "pallas_call model.py:14 in layer", "/home/me/model.py:14", "keep"
    )
    gate = decision("gate", "/home/me/model.py:13", "keep")
    lost = decision("gate", "/home/me/model.py:13", "recompute")
    code = plan_as_code(plan(*[product, kernel, gate] * 3, lost))
    assert code.count("split it") == 1
    assert code.count("'gate' (float32[") == 1
    assert code.count("'gate',") == 1
    assert code.count("pallas_call model.py:14 in layer") == 1
    assert "pallas_call model.py:14 in layer at /home/me/model.py:14, keep (3" in code


def test_a_name_that_is_kept_and_offloaded_is_offloaded_and_the_code_runs():
    """JAX refuses a policy that has a name in both lists."""
    kept = decision("gate", "/home/me/model.py:13", "keep")
    moved = decision("gate", "/home/me/model.py:14", "offload")
    code = plan_as_code(plan(kept, moved))
    assert code.count("'gate',") == 1
    assert "this policy offloads both: name one anew" in code
    assert callable(run(code)["checkpointed_model_30"])
    assert "offloads both" not in plan_as_code(plan(kept, *FULL))


def test_what_a_policy_cannot_say_is_said():
    code = plan_as_code(
        plan(
            decision("exp", "", "recompute"),
            decision("mul[1] flash.py:3 in rule", "", "keep"),
            decision(
                "custom_vjp_call model.py:9 in layer", "/home/me/model.py:9", "offload"
            ),
            decision("add nn.py:5", "/x/site-packages/nn.py:5", "keep"),
        )
    )
    assert run(code)["policy_model_30"] is jax.checkpoint_policies.nothing_saveable
    missing = code.split("out of reach of a policy")[1]
    for name in ("mul[1] flash.py:3", "custom_vjp_call", "add nn.py:5"):
        assert name in missing
    assert "Name what the kernel returns" in missing


def test_an_unrolled_model_is_told_to_scan():
    kept = decision("dot_general model.py:11 in layer", "/home/me/model.py:11", "keep")
    code = plan_as_code(plan(*FULL, unrolled=True))
    assert "write the layers as jax.lax.scan" in code
    assert "prevent_cse=True" in code
    recomputed = decision("tanh model.py:12", "/home/me/model.py:12", "recompute")
    code = plan_as_code(plan(kept, recomputed))
    assert "jax.lax.scan" not in code
    assert "prevent_cse=False" in code
    assert callable(run(code)["policy_model_30"])


def test_nothing_to_do():
    kept = decision("dot_general model.py:11 in layer", "/home/me/model.py:11", "keep")
    code = plan_as_code(plan(kept))
    assert "leave it as it is" in code
    assert not any(name.startswith("policy") for name in run(code))
    assert "no repeated body" in plan_as_code(plan(stacks=False))


def test_no_text_of_a_plan_becomes_code():
    evil = "x\nraise SystemExit\r\x0b\x0c\x1c\x85\u2028raise SystemExit\x00"
    odd = (
        dataclasses.replace(one, name=name, source=source, dtype=evil, reason=evil)
        for one in FULL
        for name, source in (
            (f"{one.name} {one.decision}{evil}", one.source),
            (one.name, evil),
            (one.decision + evil, evil),
        )
    )
    for more in ({}, {"unrolled": True}, {"source": evil}):
        found = changed(plan(*odd, **more), step=evil, target=evil)
        code = plan_as_code(found)
        run(code)
        kinds = {type(node).__name__ for node in ast.parse(code).body}
        assert kinds <= {"Import", "ImportFrom", "Assign", "FunctionDef"}


def test_names_are_valid_python_wherever_the_model_is():
    odd = decision("dot_general 2nd-try.py:1 in f", "/home/ü ß/2nd-try.py:1", "offload")
    code = plan_as_code(plan(odd, source="/home/ü ß/2nd-try.py:7"))
    assert "checkpointed_at_2nd_try_7" in run(code)
    assert '"at_2nd_try_1_dot_general"' in code
    assert "policy_layers" in run(plan_as_code(plan(odd, source="unknown source")))


def test_code_leaves_copies_to_xlas_own_pipeline():
    # A plan has that turned off: a policy's scan has no other.
    options = plan_options(stowax.target("v5p-8"), offloads=True)
    pipeline = "xla_tpu_pipeline_memory_host_transfers"
    assert options[pipeline] is False
    made = changed(plan(*FULL), compiler_options=options)
    got = run(plan_as_code(made))["compiler_options"]
    assert got == {k: v for k, v in options.items() if k != pipeline}
    assert got["xla_tpu_host_transfer_overlap_limit"] == "24"
