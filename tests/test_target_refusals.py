"""What `stowax.target` and its compiler refuse, and in which words."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from stowax import _jax_targets
from stowax._errors import (
    ArgumentError,
    CompileError,
    MissingExtraError,
    OutOfMemoryCompileError,
)
from stowax._target import _target
from stowax._target._target import target
from test_target import ONE_OF_EACH, Spec, needs_gpu, needs_tpu


def test_unknown_names_are_told_their_neighbours() -> None:
    with pytest.raises(ArgumentError) as error:
        target("v5p8")
    assert str(error.value).startswith("target: got 'v5p8'. Nearest names: v5p-8, ")
    with pytest.raises(ArgumentError, match=r"got 'h100x3'\. Nearest names: .*h100x8"):
        target("h100x3")
    with pytest.raises(ArgumentError, match=r"got 'v5p-9'\. Nearest names: v5p-8"):
        target("v5p-9")  # cores come in pairs
    with pytest.raises(
        ArgumentError, match=r"^target: got 'abacus'\. stowax.targets\(\), or `"
    ):
        target("abacus")
    with pytest.raises(ArgumentError) as error:
        target("rtx4090")  # a GPU, and no TPU is like it
    assert str(error.value) == (
        "target: got 'rtx4090'. stowax.targets(), or `stowax targets` in a terminal, "
        "lists all."
    )
    with pytest.raises(ArgumentError, match=r"^target: got 8\. Write a name such"):
        target(8)


@pytest.mark.parametrize("name", ["mi300x", "MI300", "mi355xx8"])
def test_a_gpu_of_amds_has_no_compiler_elsewhere(name: str) -> None:
    with pytest.raises(ArgumentError) as error:
        target(name)
    assert str(error.value) == (
        f"target: got {name!r}, and XLA's compiler for AMD's GPUs loads only beside an "
        "installed ROCm. Write 'gpu' on a machine with such a GPU (not tried yet), or "
        "a name from stowax.targets(): a plan holds for the chip that it is made for."
    )


@pytest.mark.skipif(_jax_targets.tpu_attached(), reason="a TPU is attached")
def test_a_platform_that_is_not_attached() -> None:
    with pytest.raises(
        ArgumentError, match=r"got 'tpu', and JAX sees no tpu here\. Write"
    ):
        target("tpu")


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_shardings_over_other_devices_are_refused(name: str) -> None:
    there = target(name)
    remedy = f"Build the mesh with stowax.target({name!r}).mesh(...)."
    elsewhere = NamedSharding(Mesh(np.array(jax.devices("cpu")[:1]), ("x",)), P())
    spec = Spec((8, 8), jnp.float32, sharding=elsewhere)
    with pytest.raises(ArgumentError) as error:
        there.compile(jax.jit(lambda tree: tree["w"] * 2), {"w": spec})
    assert str(error.value) == (
        "specs[0]['w']: got a sharding over cpu:0, which target "
        f"{name} does not have. {remedy}"
    )
    with pytest.raises(ArgumentError, match=r"^jitted: got a sharding over cpu:0"):
        there.compile(
            jax.jit(lambda x: x * 2, in_shardings=elsewhere), Spec((8, 8), jnp.float32)
        )
    abstract = NamedSharding(AbstractMesh((4,), ("x",)), P("x"))
    with pytest.raises(
        ArgumentError, match=r"got a sharding over an abstract mesh\. Build"
    ):
        there.compile(jax.jit(jnp.sin), Spec((8, 8), jnp.float32, sharding=abstract))


@needs_gpu
def test_a_mesh_of_one_gpu_target_is_not_anothers() -> None:
    split = NamedSharding(target("h100x8").mesh((8,), ("x",)), P("x"))
    with pytest.raises(ArgumentError, match="which target h200x8 does not have"):
        target("h200x8").compile(
            jax.jit(jnp.sin), Spec((8, 8), jnp.float32, sharding=split)
        )


def test_a_function_that_is_not_jitted() -> None:
    with pytest.raises(ArgumentError, match=r"^jitted: got function.*compile\(jax.jit"):
        target("cpu").compile(lambda x: x, Spec((8,), jnp.float32))


@needs_tpu
@pytest.mark.parametrize("shape", [(3, 3), (5,), (0,), (4, 1)])
def test_a_mesh_that_does_not_fit(shape: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError) as error:
        target("v5p-8").mesh(shape, ("x",))
    assert str(error.value) == (
        f"shape: got {shape} for axes ('x',) on v5p-8, which has 4 devices. "
        "Write one size per axis, with a product of at most 4."
    )


@needs_tpu
@pytest.mark.parametrize("name", ["v4-8", "v5e-4", "v5p-8", "v6e-8", "tpu7x-8"])
def test_out_of_memory_has_the_compilers_figures(name: str) -> None:
    there = target(name)
    rows = 2**38 // (1024 * 4)  # 256 GiB of float32 in, and as much out
    with pytest.raises(OutOfMemoryCompileError, match=f"not fit on {name}: ") as error:
        there.compile(jax.jit(lambda x: x + 1), Spec((rows, 1024), jnp.float32))
    assert error.value.needed_bytes == 2 * 2**38
    # Printed to two digits of a GiB; versions of libtpu differ by the last one.
    assert error.value.available_bytes == pytest.approx(
        there.device_bytes, abs=0.02 * 2**30
    )


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_the_compilers_refusal_has_its_words(name: str) -> None:
    with pytest.raises(
        CompileError, match=rf"^The compiler for {name} refused: .*'no_such_option'"
    ):
        target(name).compile(
            jax.jit(jnp.sin),
            Spec((8, 8), jnp.float32),
            compiler_options={"no_such_option": True},
        )


def uncached(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A target is made anew, and those that other tests have stay the same."""
    monkeypatch.setattr(_target, name, getattr(_target, name).__wrapped__)


def test_a_missing_tpu_compiler_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "libtpu", None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    uncached(monkeypatch, "_tpu_target")
    with pytest.raises(MissingExtraError) as error:
        target("v5p-8")
    assert str(error.value) == (
        "target 'v5p-8' needs the TPU compiler (libtpu), which is not installed. "
        'Run: pip install "stowax[tpu]"'
    )


def test_a_missing_cuda_plugin_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for plugin in ("xla_cuda12", "xla_cuda13"):
        monkeypatch.setitem(sys.modules, f"jax_plugins.{plugin}", None)
    uncached(monkeypatch, "_gpu_target")
    with pytest.raises(MissingExtraError) as error:
        target("h100")
    assert str(error.value) == (
        "target 'h100' needs JAX's CUDA plugin, which is not installed. "
        'Run: pip install "stowax[cuda]"'
    )


@needs_gpu
def test_a_missing_cuda_compiler_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_jax_targets, "has_libdevice", lambda plugin: False)
    uncached(monkeypatch, "_gpu_target")
    with pytest.raises(
        MissingExtraError, match=r"nvcc.*pip install \"stowax\[cuda\]\""
    ):
        target("h100")


def test_what_a_framework_jitted_is_no_program_of_jaxs() -> None:
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    jitted = nnx.jit(lambda model, x: model(x))
    with pytest.raises(ArgumentError) as error:
        target("cpu").compile(jitted, model, jnp.ones((4, 4)))
    start, _, rest = str(error.value).partition(" jitted, ")
    assert start.startswith("jitted: got what flax.nnx")
    assert rest == (
        "whose programs are not jax.jit's. Write target.compile(jax.jit(step), ...), "
        "or stowax.inspect, which takes what frameworks jitted."
    )
