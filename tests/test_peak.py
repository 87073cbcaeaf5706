"""The arrays at the predicted peak: whose bytes, beside what the compilers report."""

import importlib.util
import math

import jax
import jax.numpy as jnp
import pytest

import stowax
from stowax import _mlir
from stowax._predict._padding import padded_bytes
from stowax._predict._peak import predict_peak
from stowax._predict._predict import predict_memory
from stowax._records._peak import MemoryPeak, PeakArray
from stowax._step._argument_roles import argument_roles
from stowax._where import line_in
from too_large import activations, logits, spec, state

F32, GIB = 4, 2**30
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs libtpu"
)
needs_cuda = pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins") is None, reason="needs jax's plugin"
)


def peak_of(jitted, args, platform="gpu"):
    traced = jitted.trace(*args)
    lowered = traced.lower(lowering_platforms=("cuda",))
    graph = _mlir.read_graph(lowered.compiler_ir(), sources=True)
    prediction, peak = predict_peak(graph, platform, argument_roles(traced))
    assert prediction == predict_memory(graph, platform)
    return peak


def test_the_arrays_add_up_to_the_prediction():
    for program, size in ((logits, 64), (activations, 64), (state, 64)):
        for platform in ("gpu", "tpu"):
            jitted, args = program(size)
            peak = peak_of(jitted, args, platform)
            assert peak.bytes - peak.padding == peak.predicted_bytes
            assert sum(peak.by_role().values()) == peak.bytes


def test_arguments_of_no_known_role_are_arguments():
    step = jax.jit(lambda count, x: (count + 1, jnp.tanh(x)))
    traced = step.trace(spec(8), spec(1024))
    graph = _mlir.read_graph(traced.lower().compiler_ir(), sources=True)
    _, peak = predict_peak(graph, "gpu", dict.fromkeys(graph.argument_names, "other"))
    assert peak.by_role()["argument"] == (8 + 1024) * F32


def test_logits_are_told_by_what_becomes_of_them():
    rows, vocabulary = 4096, 65536
    peak = peak_of(*logits(rows, vocabulary=vocabulary))
    role, size = next(iter(peak.by_role().items()))
    each = rows * vocabulary * F32
    assert role == "logits"
    assert size % each == 0
    first = peak.arrays[0]
    assert first.shape == f"float32[{rows},{vocabulary}]"
    assert first.source.partition(":")[0].endswith("too_large.py")
    # A hidden layer is as wide as a parameter, and no softmax is taken of it.
    assert "logits" not in peak_of(*activations(4096)).by_role()


def test_activations_of_a_scan_are_named_after_what_is_stored_in_it():
    rows, width, layers = 4096, 512, 8
    peak = peak_of(*activations(rows, width=width, layers=layers))
    (hidden,) = [a for a in peak.arrays if f"{layers},{rows},{4 * width}" in a.shape]
    assert hidden.role == "activation"
    # JAX 0.12 stores the derivative, 0.10 what it is computed from.
    assert hidden.name.rpartition("/")[2] in ("tanh", "mul")
    assert hidden.bytes == hidden.count * layers * rows * 4 * width * F32
    assert peak.phase == "backward"


def test_state_that_is_not_donated_is_there_twice():
    width, layers = 256, 4
    peak = peak_of(*state(width, layers=layers, rows=8))
    weights = layers * 2 * width * 4 * width * F32
    roles = peak.by_role()
    assert roles["parameter"] == roles["optimizer state"] == weights
    assert roles["output"] >= 2 * weights
    assert {a.name for a in peak.arrays if a.role == "parameter"} <= {
        "params[0][0]",
        "params[0][1]",
    }


def test_only_what_can_be_found_is_named():
    def array(role, name, source):
        return PeakArray(
            role=role, name=name, shape="", source=source, count=1, bytes=1, padding=0
        )

    arrays = (
        array("parameter", "w", ""),
        array("activation", "jit(f)/add", "a.py:1"),
        array("workspace", "jit(f)/add", ""),
        array("fragmentation", "what libtpu adds", ""),
    )
    peak = MemoryPeak(predicted_bytes=4, phase="", source="", arrays=arrays)
    assert (peak.bytes, peak.named_bytes) == (4, 2)


# Read off the entry's layout of a program that adds one, libtpu 0.0.42 for a v5e.
LAID_OUT = {
    ((1000, 3), 4): 16384,
    ((1000, 64), 4): 262144,
    ((8, 1024, 8, 64), 4): 16777216,
    ((100,), 4): 512,
    ((1000000,), 4): 4001792,
    ((30522, 768), 4): 93782016,
    ((1024, 50257), 4): 205881344,
    ((7, 1, 1024), 4): 28672,
    ((5, 5, 5, 200), 4): 204800,
    ((3, 1000), 4): 16384,
    ((100,), 2): 512,
    ((1000, 3), 2): 8192,
    ((7, 1, 1024), 2): 16384,
    ((1024, 1024, 1), 2): 2097152,
    ((5, 5, 5, 200), 2): 102400,
}


@pytest.mark.parametrize(("shape", "item"), LAID_OUT)
def test_padding_is_that_of_a_tpu(shape, item):
    assert padded_bytes(shape, item, "tpu") == LAID_OUT[shape, item]
    assert padded_bytes(shape, item, "gpu") == math.prod(shape) * item


@needs_libtpu
def test_padding_is_what_libtpu_takes():
    shapes = ((1000, 3), (513, 7, 130), (100,))
    specs = [spec(*s, dtype=jnp.bfloat16) for s in shapes]
    one = jnp.asarray(1, jnp.bfloat16)
    program = stowax.target("v5e-4").compile(
        jax.jit(lambda *a: [x + one for x in a]), *specs
    )
    assert program.memory_analysis().argument_size_in_bytes == sum(
        padded_bytes(shape, 2, "tpu") for shape in shapes
    )


def test_a_line_of_the_users_in_a_traceback():
    jax_file, own = jax.__file__, stowax.__file__
    text = f'loc("add"("{jax_file}":1:1 to :2) at "layer"("/home/me/a.py":3:1 to :9)))'
    assert line_in(text) == "/home/me/a.py:3"
    assert line_in(f'loc("x"("{own}":1:1 to :2) at "main"("/home/me/b.py":7:1))') == ""
    assert line_in("loc(unknown)") == ""


TOO_LARGE = {
    "logits": lambda: logits(2**15),
    "activations": lambda: activations(2**18),
    "state": lambda: state(8192),
}


@pytest.mark.quick("activations-h200")
@pytest.mark.parametrize(
    ("name", "target"),
    [
        *(pytest.param(n, "v5p-8", marks=needs_libtpu) for n in TOO_LARGE),
        *(pytest.param(n, "h200", marks=needs_cuda) for n in TOO_LARGE),
    ],
)
def test_what_is_named_is_what_the_compiler_takes(name, target):
    """Steps that do not fit a v5e, where a larger machine's compiler takes them."""
    jitted, args = TOO_LARGE[name]()
    machine = stowax.target(target)
    lowered = machine.lower(jitted, *args)
    graph = _mlir.read_graph(lowered.compiler_ir(), sources=True)
    roles = argument_roles(lowered.traced)
    _, peak = predict_peak(graph, machine.platform, roles)
    assert peak.bytes > stowax.target("v5e-4").device_bytes
    assert peak.named_bytes >= 0.95 * peak.predicted_bytes
    figures = lowered.compile().memory_analysis()
    compiled = (
        figures.argument_size_in_bytes
        + figures.output_size_in_bytes
        - figures.alias_size_in_bytes
        + figures.temp_size_in_bytes
    )
    assert peak.named_bytes == pytest.approx(compiled, rel=0.1)
