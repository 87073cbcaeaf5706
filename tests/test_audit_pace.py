"""An audit passes steps by where it would slow the loop down, and finds the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stowax
from stowax._audit import _memory, _pace

W = jnp.ones((8, 8), jnp.float32)
step = jax.jit(lambda w, x: (w - x, jnp.sum(w)), donate_argnums=0)


def rests(pace, seconds, count=1):
    """Whether it rests at the next calls of the leader, a second apart, each noted."""
    found = []
    for second in range(seconds, seconds + count):
        found.append(pace.at_call("step", pace._began + second))
        if not found[-1]:
            pace.note("step", step, 8, jitted=True)
    return found


def test_it_rests_when_it_took_too_long_and_looks_again_when_it_did_not():
    pace = _pace.Pace()
    pace.note("other", None, 4, jitted=True)
    pace.note("other", None, 4, jitted=True)
    pace.spent = 100.0
    first = _pace._AT_FIRST + _pace._AT_ONCE
    seen = rests(pace, 1, 50)
    assert seen.index(True) == first + 2  # the leader is known at its second call
    assert all(seen[seen.index(True) :])
    assert not pace.wakes(jnp.sum, slow=False)
    assert pace.wakes(step, slow=False)
    assert pace.wakes(jnp.sum, slow=True)
    assert not pace.leads("other")
    assert pace.at_call("other", pace._began + 1e9)  # steps are passed by as a whole
    later = rests(pace, 10_000, 50)
    assert later == [False] * 50
    pace.spent = 10_000.0
    assert rests(pace, 10_050, _pace._AT_ONCE)[-1]


@pytest.fixture
def _resting(monkeypatch):
    """It looks at three steps, and passes one by, whatever the time."""
    monkeypatch.setattr(_memory, "_STARVED_SECONDS", 1.0)
    monkeypatch.setattr(_pace, "_AT_FIRST", 1)
    monkeypatch.setattr(_pace, "_AT_ONCE", 3)
    monkeypatch.setattr(_pace, "_REST_ABOVE", -1.0)
    monkeypatch.setattr(_pace, "_LOOK_BELOW", 2.0)


@pytest.mark.usefixtures("_resting")
def test_what_was_passed_by_is_no_part_of_what_is_told():
    def loop(reads, count=40):
        w = W.copy()
        for k in range(count):
            w, loss = step(w, np.full((8, 8), k, np.float32))
            if reads:
                float(loss)

    with stowax.audit() as audit:
        loop(True)
    assert {(f.kind, f.count) for f in audit.findings} == {
        ("host-read", 1),
        ("implicit-transfer", 1),
    }
    assert audit.record.transfers == 2
    assert 20 < audit.record.steps < 40
    assert audit.record.notes == (
        f"Another {40 - audit.record.steps} steps were passed by, to keep the loop's "
        "pace.",
    )
    with stowax.audit(steps=20) as audit:
        loop(False)
    assert [f.kind for f in audit.findings] == ["implicit-transfer"]
    assert audit.record.steps < 20


@pytest.mark.usefixtures("_resting")
def test_nothing_is_called_undonated_that_is_used_while_nobody_looks(monkeypatch):
    monkeypatch.setattr(_pace, "_AT_ONCE", 1)
    train = jax.jit(lambda w, g: w - g)
    change = jax.jit(lambda w, new: jnp.max(w - new))
    with stowax.audit(least_bytes=64) as audit:
        before, w, anchor = W.copy(), W.copy(), W.copy()
        for _ in range(40):
            new = train(w, anchor)
            change(before, new)  # w is needed, in the next step
            before, w = w, new
    assert "not-donated" not in [f.kind for f in audit.findings]


@pytest.mark.usefixtures("_resting")
def test_what_grows_is_seen_across_rests():
    big = jax.jit(lambda w: jnp.tile(w, (8, 8)))
    with stowax.audit() as audit:
        w, kept = W.copy(), []
        for _ in range(40):
            w, _ = step(w, W)
            kept.append(big(w))
    assert [(f.kind, f.bytes) for f in audit.findings] == [("growing-memory", 16384)]
    assert len(kept) == 40


def test_equal_code_in_two_files_is_two_lines():
    codes = [compile("def f():\n  return here()", name, "exec") for name in "ab"]
    from stowax._where import here

    found = []
    for code in codes:
        names = {"here": here}
        exec(code, names)
        found.append(names["f"]().file)
    assert found == ["a", "b"]
