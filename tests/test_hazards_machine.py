"""Hazards of the machine and of its compiler, and what cannot be known."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

import hazard_programs
import planned_models
from compiled_programs import compiled, machine
from hazard_programs import hazards_of, inspected, line_of
from stowax._hazards._known_bad import known_bad, version_of
from stowax._inspect._inspect import inspect
from stowax._inspect._intent import flags_of, options_of

pytestmark = pytest.mark.usefixtures("full_effort")

MIB = 2**20


# --- the machine and its compiler ---------------------------------------------------


def test_more_than_the_host_has_or_may_pin():
    """By the machine's figures: the same program, on a smaller one."""
    program = inspected("clean_state", "h200")
    host = program.memory.host.total
    for change, words in (
        ({"host_bytes": host - 1}, "and the host has 16.0 MiB for each"),
        ({"pinned_bytes": host - 1}, "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=1 in the"),
    ):
        smaller = dataclasses.replace(machine("h200"), **change)
        (hazard,) = hazard_programs.inspect_on("clean_state", smaller).hazards
        assert hazard.kind == "host-memory-exceeded"
        assert words in hazard.cost
    assert program.hazards == ()


def test_an_option_that_is_known_to_be_bad():
    option = "xla_gpu_enable_pipelined_host_offloading=False"

    def of_the_option(name):  # JAX 0.11 is known to be bad by itself
        found = hazards_of(inspected(name, "h200"), "known-bad-version")
        return [hazard for hazard in found if option in hazard.cost]

    (hazard,) = of_the_option("pipelined_by_an_option")
    assert "openxla/xla 37979, 45393" in hazard.cost
    assert "hazard_programs.py" in hazard.where
    assert of_the_option("clean_offload") == []


@pytest.mark.parametrize(
    ("version", "options", "bad"),
    [
        ("0.11.0", {}, True),
        ("0.11.1.dev20", {}, True),
        ("0.11.0", {"xla_gpu_enable_dynamic_slice_fusion": "False"}, False),
        ("0.10.2", {}, False),
        ("0.12.0.1", {}, False),
    ],
)
def test_a_version_that_is_known_to_be_bad(version, options, bad):
    """The list looks at jaxlib's version, which here is said to be another."""
    context = hazard_programs.context("clean_offload", "h200")
    intent = dataclasses.replace(context.intent, jaxlib=version, options=options)
    found = list(known_bad(context._replace(intent=intent)))
    assert [("46231" in h.cost) for h in found] == [True] * bad


def test_rematerialization_that_counts_host_memory_is_known():
    context = hazard_programs.context("clean_offload", "h200")
    small = context.machine._replace(device_bytes=context.memory.device.total)
    found = [hazard.cost for hazard in known_bad(context._replace(machine=small))]
    assert sum("counts host memory as the device's" in cost for cost in found) == 1
    options = {"xla_disable_hlo_passes": "a,rematerialization"}
    intent = dataclasses.replace(context.intent, options=options)
    found = list(known_bad(context._replace(machine=small, intent=intent)))
    assert not any("counts host memory" in hazard.cost for hazard in found)


def test_versions_and_options_are_read():
    assert version_of("0.10.2.dev3+abc") == (0, 10, 2)
    flags = {"XLA_FLAGS": "--xla_a=1 --xla_b", "LIBTPU_INIT_ARGS": "--xla_a=2"}
    assert flags_of(flags) == {"xla_a": "2", "xla_b": "true"}
    assert options_of(flags, {"xla_a": 3}, None) == {"xla_a": "3", "xla_b": "true"}


# --- what cannot be known, and what is right ----------------------------------------


def test_what_was_compiled_already_says_what_was_not_looked_for():
    found = inspect(compiled("nested", "v5e-4").jax_compiled)
    left_out = {o.what: o.reason for o in found.omissions}
    (what,) = [what for what in left_out if "offload-vanished" in what]
    assert "policy-name-unmatched" in what
    assert "give the jitted function and its arguments" in left_out[what]
    record = json.loads(found.to_json())
    assert [o["what"] for o in record["omissions"]] == list(left_out)
    assert inspected("clean_donated", "h200").omissions == ()


def test_a_policy_of_the_users_own_is_said():
    found = inspected("policy_of_my_own", "h200")
    assert found.hazards == ()
    (omission,) = found.omissions
    assert omission.what == "policy-name-unmatched"
    line = line_of(hazard_programs._scanned, "jax.checkpoint(")
    assert f"{line} does not say what it names" in omission.reason


def test_a_program_of_a_target_knows_what_was_asked_for():
    """`Target.compile` keeps the function and its options beside the program."""
    there = machine("h200")
    device, host = there.sharding(), there.sharding(memory_kind="pinned_host")
    jitted, args = hazard_programs.clean_offload(device, host)
    options = {"xla_gpu_enable_pipelined_host_offloading": True}
    found = inspect(there.compile(jitted, *args, compiler_options=options))
    assert hazards_of(found, "known-bad-version")
    assert not any("offload-vanished" in o.what for o in found.omissions)


def test_a_cpu_says_nothing_of_host_memory():
    found = inspect(jax.jit(lambda x: x @ x), jnp.ones((8, 8)), target="cpu")
    assert found.hazards == ()
    (omission,) = found.omissions
    assert "offload-vanished" in omission.what
    assert "on a CPU all memory is the host's" in omission.reason


def test_a_sharded_step_is_clean():
    found = hazard_programs.sharded("v5p-8")
    assert found.hazards == ()
    assert [o.what for o in found.omissions] == ["cheaper-to-recompute"]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h200", "v5p-8"])
@pytest.mark.usefixtures("usual_promotion")
def test_plans_are_clean(target):
    """Activations and state in host memory, and what a plan leaves as it is."""
    import test_state

    step, args = (
        test_state.step_with(test_state.ADAM),
        test_state.arguments(test_state.ADAM),
    )
    away = planned_models.plan(step, *args, target=target, pin=test_state.OFFLOAD)
    train, batch = planned_models.train, planned_models.arguments()
    inputs = {"layer input 0": "offload"}
    some = planned_models.plan(train, *batch, target=target, pin=inputs)
    left = planned_models.plan(train, *batch, target=target)
    for plan, function, specs in (
        (away, step, args),
        (some, train, batch),
        (left, train, batch),
    ):
        found = inspect(plan.apply(function), *plan.specs(*specs), target=target)
        assert found.hazards == ()
