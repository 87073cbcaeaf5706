"""Plans end to end: what they promise holds in a program compiled apart from them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

import stowax
from planned_models import (
    LAYERS,
    MIB,
    QUICK,
    ROWS,
    WIDTH,
    arguments,
    bytes_of,
    compiled_total,
    numbers,
    plan,
    planned,
    spec,
    step_of,
    train,
    weights,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("full_effort")]

TARGETS = ("h200", "v5e-1")
# A layer's input, b × w; what the others add up to: b × 4w each.
INPUT = 4 * ROWS * WIDTH
INNER = 4 * INPUT


def keeping_inputs():
    """A budget in which little more than each layer's input has room on the device."""
    return bytes_of(arguments()) + LAYERS * INPUT + 8 * INNER


def of_layers(found):
    """The decisions on values of layers, without those on the step's state."""
    return [d for d in found.decisions if d.stack != "state"]


@pytest.mark.parametrize("target", TARGETS)
def test_with_room_for_everything_nothing_moves(target):
    found = planned(target)
    written = found.search.trials[0]
    assert written.what == "as written"
    assert written.compiled_bytes > LAYERS * 2 * INNER  # it does keep the activations
    assert found.fits
    assert found.step_seconds <= written.step_seconds
    assert "offload" not in {d.decision for d in found.decisions}
    assert found.program.donate_argnums == ()
    assert found.host_bytes == 0
    assert compiled_total(found, train, *arguments()) == found.device_bytes


@pytest.mark.parametrize("target", TARGETS)
def test_a_plan_that_fits_fits_when_compiled_apart(target):
    written = planned(target).search.trials[0].compiled_bytes
    budget = keeping_inputs()
    assert budget < 0.7 * written
    found = planned(target, budget)
    assert found.fits
    # Where the compiled program beats what the model likes best, nothing is proven.
    assert found.outcome == ("optimal" if found.gap <= 1e-4 else "feasible")
    assert found.gap < 0.15
    assert compiled_total(found, train, *arguments()) == found.device_bytes <= budget
    assert {d.decision for d in found.decisions} >= {"recompute"}
    assert found.budget_bytes == budget


@pytest.mark.parametrize("target", TARGETS[1:])
def test_what_does_not_fit_names_the_smallest_budget_and_it_works(target):
    # Less than the arguments alone: no compiler can.
    short = planned(target, bytes_of(arguments()) // 2)
    assert (short.outcome, short.fits) == ("infeasible", False)
    assert short.smallest_budget == short.device_bytes > short.budget_bytes
    # The state is in host memory: what is left is the batch and one layer at a time.
    way = dict(text.split(": ", 1) for text in short.proof.in_the_way)
    assert way["batch"].startswith("4.00 MiB")
    assert way["parameter"].endswith("copy of args[0]['down']")
    assert "at planned_models.py:32" in way["activation gradient"]
    assert short.proof.peak.named_bytes >= 0.95 * short.proof.peak.predicted_bytes
    text = str(short)
    assert "DOES NOT FIT" in text
    assert "smallest budget" in text

    found = planned(target, short.smallest_budget)
    assert found.fits
    assert compiled_total(found, train, *arguments()) <= short.smallest_budget


@pytest.mark.parametrize("target", TARGETS)
def test_planned_offloads_are_in_the_compiled_program(target):
    found = plan(train, *arguments(), target=target, pin={"layer input 0": "offload"})
    (offloaded,) = [d for d in found.decisions if d.decision == "offload"]
    assert offloaded.bytes == INPUT
    assert offloaded.count == LAYERS
    assert offloaded.pinned == "layer input 0"
    assert found.host_bytes >= (LAYERS - 1) * INPUT
    inspection = stowax.inspect(
        found.apply(train),
        *found.specs(*arguments()),
        target=stowax.target(target),
    )
    for direction in ("device-to-host", "host-to-device"):
        moved = sum(
            t.bytes * t.trips for t in inspection.transfers if t.direction == direction
        )
        assert moved >= (LAYERS - 1) * INPUT
    assert inspection.memory.device.total == found.device_bytes
    assert inspection.memory.host.total == found.host_bytes


def test_a_pin_is_kept_where_nothing_had_to_move():
    # Everything fits, and the user has the last word all the same.
    free = planned("h200")
    assert free.host_bytes == 0
    pinned = plan(train, *arguments(), pin={"dot_general*": "offload"})
    assert pinned.outcome == "optimal"
    products = [d for d in pinned.decisions if d.name.startswith("dot_general")]
    assert {d.decision for d in products} == {"offload"}
    (price,) = pinned.pins
    assert (price.pattern, price.decision) == ("dot_general*", "offload")
    assert price.seconds > 0


def test_the_backward_pass_starts_from_what_is_pinned_though_it_reads_something_else():
    @stowax.stow
    def loss(params, x):
        def body(c, w):
            product = checkpoint_name(c @ w, "product")
            return jnp.tanh(product), None  # its derivative reads what is made of it

        return jnp.mean(jax.lax.scan(body, x, params)[0] ** 2)

    step = step_of(loss)
    args = spec(LAYERS, WIDTH, WIDTH), spec(ROWS, WIDTH)
    found = plan(step, *args, pin={"product": "offload"})
    decisions = {d.name.split()[0]: d for d in of_layers(found)}
    assert decisions["product"].decision == "offload"
    assert decisions["product"].pinned == "product"
    assert "recompute" in {d.decision for d in found.decisions}
    assert found.host_bytes >= (LAYERS - 1) * INPUT
    assert found.pins[0].seconds > 0
    values = numbers(args)
    expected = jax.tree.leaves(jax.jit(step)(*values))
    made = jax.tree.leaves(found.apply(step)(*found.place(*values)))
    for ours, plain in zip(made, expected, strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-6)


def test_forbidding_offloads_and_recomputation():
    budget = keeping_inputs()
    without = plan(train, *arguments(), budget=budget, forbid="offload")
    assert {d.decision for d in without.decisions} == {"keep", "recompute"}
    assert without.host_bytes == 0
    kept = plan(train, *arguments(), budget=budget, forbid=("recompute",))
    assert "recompute" not in {d.decision for d in kept.decisions}


def test_host_budget_holds():
    budget = bytes_of(arguments()) + 2 * INPUT + 6 * INNER
    found = plan(train, *arguments(), budget=budget, host_budget=2 * INPUT)
    assert found.host_bytes <= 2 * INPUT
    assert found.proof.host_budget_bytes == 2 * INPUT


def test_state_is_donated_where_the_memory_is_needed():
    assert planned("h200").program.donate_argnums == ()
    assert planned("h200", keeping_inputs()).program.donate_argnums == (0,)
    always = plan(train, *arguments(), donate=True)
    never = plan(train, *arguments(), budget=keeping_inputs(), donate=False)
    assert always.program.donate_argnums == (0,)
    assert always.host_bytes == 0
    assert never.program.donate_argnums == ()
    assert compiled_total(never, train, *arguments()) == never.device_bytes


def test_unrolled_as_good_as_scanned():
    pin = {"*": "recompute"}  # which leaves the layers' inputs to be kept
    scanned = plan(train, *arguments(), pin=pin)
    args = arguments(unrolled=True)
    unrolled = plan(train, *args, pin=pin)
    for found in (unrolled, scanned):
        # Of both, no more than what a layer is given is kept.
        kept = {d.name for d in of_layers(found) if d.decision != "recompute"}
        assert kept <= {"layer input 0"}
    assert unrolled.device_bytes <= 1.15 * scanned.device_bytes
    assert compiled_total(unrolled, train, *args) == unrolled.device_bytes


def test_bytes_are_per_device_of_a_sharded_step():
    target = stowax.target("v5p-8")
    chips = target.device_count
    mesh = target.mesh((chips,), ("fsdp",))

    def sharded(s, *partition):
        sharding = NamedSharding(mesh, PartitionSpec(*partition))
        return jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding)

    params, x = arguments()
    args = (
        jax.tree.map(lambda s: sharded(s, None, "fsdp"), params),
        sharded(x, "fsdp"),
    )
    budget = (bytes_of(arguments()) + LAYERS * INPUT + 4 * INNER) // chips + 24 * MIB
    found = plan(train, *args, target="v5p-8", budget=budget)
    assert found.fits
    assert compiled_total(found, train, *args) == found.device_bytes <= budget
    activations = [d for d in found.decisions if d.role == "activation"]
    assert activations
    for decision in activations:  # the rows are spread, each value with them
        whole = 4 * decision.shape[0] * decision.shape[1]
        assert decision.bytes == whole // chips
    for given, placed in zip(
        jax.tree.leaves(args), jax.tree.leaves(found.specs(*args)), strict=True
    ):
        assert placed.sharding.spec == given.sharding.spec
        assert placed.sharding.memory_kind in (None, "device")


def test_two_different_stacks():
    @stowax.stow
    def loss(params, x):
        encoded = jnp.mean(jnp.sin(x), axis=0, keepdims=True)
        encoded = (
            encoded
            + jax.lax.scan(
                lambda c, w: (c + jnp.sin(c @ w), None), x, params["encoder"]
            )[0]
        )

        def decode(c, w):
            return c + jnp.tanh(jax.nn.gelu(c @ w["up"]) @ w["down"]) * encoded, None

        return jnp.mean(jax.lax.scan(decode, x, params["decoder"])[0])

    params = {"encoder": spec(6, WIDTH, WIDTH), "decoder": weights()}
    args = (params, spec(ROWS, WIDTH))
    step = step_of(loss)
    budget = bytes_of(args) + (6 + 2 * LAYERS) * INPUT + 8 * INNER
    found = plan(step, *args, budget=budget)
    assert found.fits
    assert compiled_total(found, step, *args) == found.device_bytes <= budget
    assert [s.count for s in found.program.stacks] == [6, LAYERS]
    assert {d.stack for d in of_layers(found)} == {s.name for s in found.program.stacks}


def test_the_users_own_checkpoint_is_kept_or_decided_anew():
    @stowax.stow
    def loss(params, x):
        body = jax.checkpoint(lambda c, w: (layer_of(c, w), None))
        return jnp.mean(jax.lax.scan(body, x, params)[0] ** 2)

    def layer_of(c, w):
        return c + jnp.tanh(jax.nn.gelu(c @ w["up"]) @ w["down"])

    pin = {"layer input 0": "offload"}
    anew = plan(step_of(loss), *arguments(), pin=pin)
    kept = plan(step_of(loss), *arguments(), pin=pin, keep_checkpoint=True)
    assert kept.program.options.keep_checkpoint
    # Inside a checkpoint there is nothing left to decide on but what it reads.
    assert {d.name for d in of_layers(kept)} == {"layer input 0"}
    assert len(anew.decisions) > len(kept.decisions)
    assert compiled_total(kept, step_of(loss), *arguments()) == kept.device_bytes


def test_compiler_options_of_the_user_reach_the_program():
    asked = {"xla_tpu_scheduler_percent_shared_memory_limit": "90", **QUICK}
    found = plan(train, *arguments(), target="v5e-1", compiler_options=asked)
    assert found.program.compiler_options.items() >= asked.items()
    assert found.apply(train).stowax_compiler_options == found.program.compiler_options
    with pytest.raises(stowax.StowaxError, match="no_such_option"):
        plan(train, *arguments(), compiler_options={"no_such_option": "1"})


def test_progress_goes_to_standard_error_or_to_the_user(capsys, monkeypatch):
    monkeypatch.setattr("stowax._plan._asked.QUIET_SECONDS", 0.0)
    stowax.plan(train, *arguments(), target="h200")
    out, err = capsys.readouterr()
    assert out == ""
    assert "stowax: tracing" in err
    assert "fits" in err
    lines = []
    stowax.plan(train, *arguments(), target="h200", progress=lines.append)
    assert len(lines) >= 3
    stowax.plan(train, *arguments(), target="h200", progress=False)
    assert capsys.readouterr() == ("", "")


def test_the_record_says_what_was_planned_and_with_what():
    found = planned("h200", keeping_inputs())
    assert found.program.versions["jax"] == jax.__version__
    assert all(found.program.versions[name] for name in ("stowax", "python"))
    assert [(a.path, a.role, a.shape) for a in found.program.arguments] == [
        ("args[0]['down']", "parameter", (LAYERS, 4 * WIDTH, WIDTH)),
        ("args[0]['up']", "parameter", (LAYERS, WIDTH, 4 * WIDTH)),
        ("args[1]", "batch", (ROWS, WIDTH)),
    ]
    assert (found.target, found.program.compile_only) == ("h200", True)
    assert {"keep all", "recompute all", "offload layer inputs"} <= {
        b.name for b in found.baselines
    }
    assert len(found.search.trials) <= 4
    for decision in found.decisions:
        assert decision.reason
        assert decision.name
    assert "FITS" in str(found)
    assert "nothing" in str(plan(train, *arguments(), forbid=["recompute"])).lower()
    still = plan(train, *arguments(), budget=found.budget_bytes, forbid=["offload"])
    assert not any("offload" in b.name for b in still.search.baselines)


@pytest.mark.parametrize("word", ["tracing", "surveying", "compiling"])
def test_who_is_told_of_progress_can_stop_it(word):
    """An error of the user's own, not a reason to plan less of the step."""

    told = []

    def cancelled(line):
        told.append(line)
        if line.startswith(word) and told.count(line) == 1:
            raise TimeoutError("enough")

    with pytest.raises(TimeoutError, match="enough") as caught:
        stowax.plan(train, *arguments(), target="h200", progress=cancelled)
    note = "stowax: raised by the function that was given as progress"
    assert caught.value.__notes__ == [note]
    assert told[-1].startswith(word)
