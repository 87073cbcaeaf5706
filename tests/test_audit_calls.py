"""The ways to ask for an audit, what it gives back, and what it allows."""

import contextlib
import dataclasses
import inspect
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stowax
from stowax._audit import _memory
from stowax._record_json import record_of
from stowax._records._audit import AuditRecord, Finding
from stowax.report import audit_text


@pytest.fixture(autouse=True)
def _busy_machine(monkeypatch):
    """A thread that others keep from running is not the loop's fault."""
    monkeypatch.setattr(_memory, "_STARVED_SECONDS", 1.0)


W = jnp.ones((8, 8), jnp.float32)
step = jax.jit(lambda w, x: (w - x, jnp.sum(w)), donate_argnums=0)


def test_a_step_is_run_with_its_own_results_and_arguments_stay():
    seen = []

    def train(w, x):
        w, loss = step(w, x)
        seen.append(loss)
        return w, loss

    audit = stowax.audit(train, W, np.ones((8, 8), np.float32), steps=4)
    assert [float(loss) for loss in seen] == [64, 0, -64, -128]
    assert not W.is_deleted()
    (found,) = audit.findings
    assert (found.kind, found.count) == ("repeated-constant", 1)
    assert found.bytes == 8 * 8 * 4
    assert audit.record.steps == 4
    jitted = stowax.audit(step, W, W)
    assert jitted.findings == ()
    assert jitted.record.steps == 5


def test_it_is_json_and_back():
    audit = stowax.audit(lambda w: step(w, np.ones((8, 8), np.float32))[0], W)
    data = json.loads(json.dumps(audit.to_json()))
    assert record_of(AuditRecord, data) == audit.record
    fields = {"kind", "file", "line", "count", "bytes", "seconds", "remedy"}
    assert fields < set(data["findings"][0])


@pytest.mark.slow
def test_what_is_meant_so_is_allowed():
    def loop(allow=()):
        with stowax.audit(allow=allow) as audit:
            w = W.copy()
            for _ in range(4):
                w, loss = step(w, W)
                float(loss)
        return audit

    def commented():
        with stowax.audit() as audit:
            w = W.copy()
            for _ in range(4):
                w, loss = step(w, W)
                float(loss)  # stowax: allow host-read, early-wait
        return audit

    assert [f.kind for f in loop().findings] == ["host-read"]
    for audit in (loop("host-read"), loop(["host-read:test_audit_calls.py"])):
        assert audit.findings == ()
        assert [f.kind for f in audit.record.allowed] == ["host-read"]
        assert str(audit).endswith("1 allowed: host-read")
    assert commented().findings == ()
    assert len(loop(["host-read:calls.py"]).findings) == 1


def test_after_its_number_of_steps_nothing_is_noted():
    with stowax.audit(steps=3) as audit:
        w = W.copy()
        for k in range(10):
            w, loss = step(w, W)
            if k > 4:
                float(loss)
    assert audit.findings == ()
    assert audit.record.steps <= 4


def test_an_error_goes_through_and_what_ran_is_told():
    def loop():
        for k in range(5):
            _, loss = step(W.copy(), W)
            float(loss)
            assert k < 4

    audit = stowax.audit()
    with pytest.raises(AssertionError), audit:
        loop()
    assert "host-read" in [f.kind for f in audit.findings]


def test_without_a_loop_it_says_so():
    with stowax.audit() as audit:
        pass
    assert audit.findings == ()
    assert "No jitted function was called" in str(audit)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: stowax.audit(steps=1), "steps: got 1. Write 2 or more"),
        (
            lambda: stowax.audit(*json.loads("[3]")),
            "function: got int. Write stowax.audit",
        ),
        (lambda: stowax.audit(allow="hostread"), "Did you mean host-read?"),
        (lambda: stowax.audit().findings, "Read it after the `with` block"),
        (
            lambda: stowax.audit(lambda w: w, W).__enter__(),
            "audit: got an audit that is over. Make another one",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(wrong, said):
    with pytest.raises(stowax.StowaxError) as error:
        wrong()
    assert said in str(error.value)


def test_text_is_this():
    finding = Finding(
        kind="host-read",
        file="train.py",
        line=7,
        count=1,
        bytes=4,
        seconds=0.0021,
        what="float() reads 4 B of this step's result",
        remedy="Read it one step late.",
    )
    record = AuditRecord(
        findings=(finding,),
        steps=20,
        step_file="train.py",
        step_line=5,
        transfers=2,
        step_seconds=0.004,
    )
    assert audit_text(record, width=60).splitlines() == [
        "1 finding in 20 steps of train.py:5. A step takes 4.0 ms,",
        "with 2 transfers.",
        "",
        "train.py:7: host-read (1 a step, 4 B, 2.1 ms)",
        "  what    float() reads 4 B of this step's result",
        "  remedy  Read it one step late.",
    ]
    # What happens now and then is told by how often, not as 0.1 a step.
    rare = dataclasses.replace(finding, count=0.1)
    text = audit_text(dataclasses.replace(record, findings=(rare,)), width=80)
    assert "\ntrain.py:7: host-read (2 in 20 steps, 4 B, 2.1 ms a step)\n" in text


def test_functions_of_one_line_and_derivatives_of_one_function_are_told_apart():
    def loss(w, x):
        return jnp.sum(w * w) * jnp.mean(x)

    value, slope = jax.jit(loss), jax.jit(jax.grad(loss))
    one, other = jax.jit(lambda w, g: w - g), jax.jit(lambda w: w + w)
    with stowax.audit() as audit:
        w = W
        for _ in range(4):
            w, _ = other(one(w, slope(w, W))), value(w, W)
    assert audit.findings == ()
    assert audit.record.steps == 4


def test_a_program_compiled_ahead_of_time_is_a_step_too():
    compiled = step.lower(W, W).compile()
    with stowax.audit() as audit:
        w = W.copy()
        for k in range(4):
            w, _ = compiled(w, np.full((8, 8), k, np.float32))
    assert [f.kind for f in audit.findings] == ["implicit-transfer"]
    assert audit.record.notes == ()


def test_its_first_call_too():
    programs = [
        step.lower(W, W).compile(),
        jax.jit(lambda w: jnp.sum(w)).lower(W).compile(),
    ]
    with stowax.audit(steps=2) as audit:
        _, loss = programs[0](W.copy(), np.ones((8, 8), np.float32))
        programs[1](W)
        float(loss)
    calls = [e for e in audit._recorder.events if e.what == "call"]
    assert [e.name for e in calls] == ["<lambda>", "<lambda>"]
    assert calls[0].key != calls[1].key
    assert calls[0].sent[0].described == "a NumPy array of float32[8, 8]"


def _donates(uses):
    with stowax.audit() as audit:
        w = W.copy()
        for _ in range(3):
            new, _ = step(w, W)
            with contextlib.suppress(RuntimeError, ValueError):
                uses(w)
            w = new
    return audit.findings


@pytest.mark.slow
@pytest.mark.parametrize(
    "uses",
    [
        lambda w: jax.device_get(w),
        lambda w: np.asarray(w),
        lambda w: w.item(0),
        lambda w: jax.jit(lambda x: x + 1)(w),
        lambda w: jax.block_until_ready(w),
    ],
)
def test_a_donated_buffer_that_is_used_again_names_both_lines(uses):
    """Also where the script catches the error and goes on."""
    source, first = inspect.getsourcelines(_donates)
    donated = first + next(k for k, line in enumerate(source) if "step(w, W)" in line)
    found = [f for f in _donates(uses) if f.kind == "donated-reuse"]
    assert len(found) == 1
    assert found[0].line == uses.__code__.co_firstlineno
    assert f"to <lambda> at test_audit_calls.py:{donated} and" in found[0].what
    assert found[0].count == 1


def test_the_error_that_ends_a_loop_names_both_lines():
    def loop():
        w = W.copy()
        for _ in range(3):
            step(w, W)

    audit = stowax.audit()
    with pytest.raises((RuntimeError, ValueError)), audit:
        loop()
    (found,) = [f for f in audit.findings if f.kind == "donated-reuse"]
    assert found.line == loop.__code__.co_firstlineno + 3
    at = f"test_audit_calls.py:{found.line}"
    assert f"w was donated to <lambda> at {at} and is used again here" in found.what


def test_a_mistake_of_the_audits_is_told_and_the_loop_goes_on(monkeypatch):
    def broken(*_):
        raise KeyError("no such thing")

    monkeypatch.setattr("stowax._audit._known.is_operation", broken)
    with stowax.audit() as audit:
        assert step(W.copy(), W)[1] == 64
    assert "by a mistake of its own: KeyError" in " ".join(audit.record.notes)


def test_a_state_that_is_committed_by_the_first_step_says_so():
    """The device's name is the same then: "lies elsewhere: A, then A" helps nobody."""
    place = jax.devices()[0]
    with stowax.audit() as audit:
        w = W.copy()
        for _ in range(4):
            w, _ = step(w, jax.device_put(W, place))
    [found] = audit.findings
    assert found.kind == "recompilation"
    assert "is compiled again, once in 4 steps: w became committed" in found.what
