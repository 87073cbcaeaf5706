"""Targets: real compilers for chips that are not there, memory kinds honoured."""

import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from stowax import _jax_targets
from stowax._errors import CompileError
from stowax._records._stages import Link
from stowax._streams import quiet_native_log
from stowax._target import _target
from stowax._target._machine import HOST_FRACTION
from stowax._target._target import target, targets, targets_table
from stowax.report import targets_text

ROWS, COLUMNS = 1024, 512
BYTES = ROWS * COLUMNS * 4  # float32
Spec = jax.ShapeDtypeStruct

needs_tpu = pytest.mark.skipif(
    not _jax_targets.has_libtpu(), reason="no libtpu installed"
)
needs_gpu = pytest.mark.skipif(
    _jax_targets.cuda_plugin() is None, reason="no CUDA plugin"
)


def tpu(name: str) -> object:
    return pytest.param(name, marks=needs_tpu)


def gpu(name: str) -> object:
    return pytest.param(name, marks=needs_gpu)


ONE_OF_EACH = [tpu("v5p-8"), gpu("h100x8")]


def fetch_and_double(x: jax.Array) -> jax.Array:
    """Reads an array that may lie on the host, on the device."""
    return jax.device_put(x, jax.memory.Space.Device) * jnp.float32(2)


@pytest.mark.parametrize(
    "name",
    [tpu("v5e-4"), tpu("v5p-8"), tpu("v6e-8"), tpu("v4-8"), gpu("h200"), gpu("h100x8")],
)
def test_memory_kinds_are_honoured(name: str) -> None:
    there = target(name)
    mesh = there.mesh((there.device_count,), ("rows",))
    host = there.sharding("rows", mesh=mesh, memory_kind="pinned_host")
    device = there.sharding("rows", mesh=mesh, memory_kind="device")
    program = there.compile(
        jax.jit(
            lambda x, y: (fetch_and_double(x), jax.device_put(y, host)),
            out_shardings=(device, host),
        ),
        Spec((ROWS, COLUMNS), jnp.float32, sharding=host),
        Spec((2 * ROWS, COLUMNS), jnp.float32, sharding=device),
    )
    share = BYTES // there.device_count
    memory = program.memory_analysis()
    assert memory.host_argument_size_in_bytes == share
    assert memory.argument_size_in_bytes == 2 * share
    assert memory.host_output_size_in_bytes == 2 * share
    # XLA may round the device output up by the table of a tuple's addresses.
    assert share <= memory.output_size_in_bytes <= share + 512
    assert "S(5)" in program.as_text()  # XLA's name for host memory


@pytest.mark.parametrize(
    "name",
    [tpu("v5e-1"), tpu("v5p-8"), tpu("tpu7x-2")]
    + [gpu(name) for name in ("a100-80", "b200", "b300", "gh200", "gb200", "gb300")],
)
def test_specs_without_sharding_go_to_one_device(name: str) -> None:
    there = target(name)
    program = there.compile(
        jax.jit(lambda tree: tree["a"] + tree["b"]),
        {"a": Spec((ROWS, COLUMNS), jnp.float32), "b": np.ones((ROWS, 1), np.float32)},
    )
    # b may be padded to the chip's tiles; a is whole, not a share.
    assert program.memory_analysis().argument_size_in_bytes >= BYTES + ROWS * 4
    assert program.memory_analysis().output_size_in_bytes == BYTES


@needs_tpu
@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("v4-8", 4),
        ("v4-4096", 2048),
        ("v5e-1", 1),
        ("v5litepod-8", 8),
        ("v5e-256", 256),
        ("v5p-8", 4),
        ("v5p-32", 16),
        ("v5p-1024", 512),
        ("v6e-1", 1),
        ("v6e-256", 256),
        ("tpu7x-2", 2),
        ("tpu7x-8", 8),
    ],
)
def test_names_count_as_the_cloud_does(name: str, devices: int) -> None:
    assert target(name).device_count == devices
    assert len(set(target(name).devices)) == devices


@needs_tpu
def test_hundreds_of_chips_share_an_array() -> None:
    pod = target("v5p-512")
    assert pod.device_count == 256
    mesh = pod.mesh((16, 16), ("data", "model"))
    # A share of 128 x 128 fills whole tiles of the chip's memory: nothing is padded.
    split = pod.sharding("data", "model", mesh=mesh, memory_kind="pinned_host")
    spec = Spec((16 * 128, 16 * 128), jnp.float32, sharding=split)
    memory = pod.compile(jax.jit(fetch_and_double), spec).memory_analysis()
    assert memory.host_argument_size_in_bytes == 128 * 128 * 4


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_donation_stays_as_written(name: str) -> None:
    spec = Spec((ROWS, COLUMNS), jnp.float32)
    memory = (
        target(name)
        .compile(jax.jit(lambda x: x + 1, donate_argnums=0), spec)
        .memory_analysis()
    )
    assert memory.alias_size_in_bytes == BYTES


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_the_functions_own_shardings_decide_for_open_specs(name: str) -> None:
    there = target(name)
    split = there.sharding("x", mesh=there.mesh((4,), ("x",)))
    spec = Spec((ROWS, COLUMNS), jnp.float32)
    whole = Spec((ROWS, COLUMNS), jnp.float32, sharding=split)
    for jitted, argument in (
        (jax.jit(lambda x: x * 2, in_shardings=split, out_shardings=split), spec),
        (jax.jit(lambda x: jax.lax.with_sharding_constraint(x * 2, split)), spec),
        (jax.jit(lambda x: x * 2), whole),
    ):
        memory = there.compile(jitted, argument).memory_analysis()
        assert memory.output_size_in_bytes == BYTES // 4


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_an_array_keeps_its_memory_kind(name: str) -> None:
    cpu = SingleDeviceSharding(jax.devices("cpu")[0], memory_kind="pinned_host")
    array = jax.device_put(np.ones((ROWS, COLUMNS), np.float32), cpu)
    memory = target(name).compile(jax.jit(fetch_and_double), array).memory_analysis()
    assert memory.host_argument_size_in_bytes == BYTES
    assert memory.argument_size_in_bytes == 0


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_host_buffer_is_updated_in_place(name: str) -> None:
    """What streaming of state rests on, and what loses its memory space most easily."""
    there = target(name)
    host = there.sharding(memory_kind="pinned_host")

    def write_block(buffer: jax.Array, block: jax.Array) -> jax.Array:
        block = jax.device_put(block, jax.memory.Space.Host)
        return jax.lax.dynamic_update_slice(buffer, block, (0, 0))

    memory = there.compile(
        jax.jit(write_block, donate_argnums=0, out_shardings=host),
        Spec((ROWS, COLUMNS), jnp.float32, sharding=host),
        Spec((8, COLUMNS), jnp.float32),
    ).memory_analysis()
    assert memory.host_alias_size_in_bytes == BYTES
    assert memory.temp_size_in_bytes < BYTES


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_program_gives_its_schedule_as_a_proto(name: str) -> None:
    lowered = target(name).lower(
        jax.jit(lambda x: jnp.sin(x) @ x), Spec((512, 512), jnp.float32)
    )
    assert "stablehlo.dot_general" in lowered.as_text()
    program = lowered.compile()
    (proto,) = program.hlo_module_protos()
    assert b"jit__lambda" in proto
    assert "is_scheduled=true" in program.as_text()
    assert program.target_name == name
    if name == "v5p-8":  # what the simulator of the schedule lives on
        assert "estimated_cycles" in program.as_text()


@needs_gpu
def test_a_product_that_cannot_be_tiled_is_left_to_the_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # JAX 0.10 says so of ViT-g/14's, thirty seconds into a compile.
    words = "INTERNAL: Couldn't find output tile sizes that satisfy hlo: %dot.74"
    compile_module, asked = _jax_targets.compile_module, []

    def refuse(lowered: object, devices: object, options: object) -> object:
        asked.append(options)
        if not options or options.get("xla_gpu_enable_triton_gemm", True):
            raise jax.errors.JaxRuntimeError(words)
        return compile_module(lowered, devices, options)

    monkeypatch.setattr(_jax_targets, "compile_module", refuse)
    where = target("h200")
    compiled = where.compile(jax.jit(lambda x: x @ x), jnp.zeros((8, 8)))
    assert asked == [None, {"xla_gpu_enable_triton_gemm": False}]
    assert compiled.options == asked[1]
    assert "dot(" in compiled.as_text() or "gemm" in compiled.as_text()
    # Whoever asks for Triton is told what comes of it.
    lowered = where.lower(jax.jit(lambda x: x @ x), jnp.zeros((8, 8)))
    with pytest.raises(CompileError, match="h200 refused: INTERNAL: Couldn't find"):
        lowered.compile({"xla_gpu_enable_triton_gemm": True})


def test_the_cpu_runs_what_it_compiled_and_books_nothing_on_the_host() -> None:
    cpu = target("cpu")
    assert not cpu.compile_only
    assert cpu.devices == tuple(jax.devices("cpu"))
    host = cpu.sharding(memory_kind="pinned_host")
    x = jax.device_put(np.arange(8, dtype=np.float32), host)
    program = cpu.compile(jax.jit(fetch_and_double), x)
    np.testing.assert_array_equal(program.jax_compiled(x), np.arange(8) * 2)
    assert program.memory_analysis().host_argument_size_in_bytes == 0
    assert program.buffer_assignment_proto()


def test_no_name_means_what_jax_uses() -> None:
    assert target().devices == tuple(jax.devices())
    assert target().platform == jax.default_backend()


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_figures_of_a_target_are_per_device(name: str) -> None:
    there = target(name)
    chip = there.chip
    assert there.device_bytes == chip.allowed_bytes.value <= there.memory_bytes
    assert there.host_bytes == int(
        chip.host_bytes.value * HOST_FRACTION / chip.chips_per_host
    )
    assert there.compile_only
    sustained = chip.sustained_out.value
    assert there.link.device_to_host == (sustained or chip.link_out.value)


@needs_gpu
@pytest.mark.parametrize("name", ["gb200x72", "gb300x72"])
def test_a_rack_of_superchips_is_one_target(name: str) -> None:
    rack = target(name)
    mesh = rack.mesh((18, 4), ("host", "gpu"))
    split = rack.sharding(("host", "gpu"), mesh=mesh)
    spec = Spec((72 * 8, COLUMNS), jnp.float32, sharding=split)
    memory = rack.compile(jax.jit(jnp.sin), spec).memory_analysis()
    assert memory.argument_size_in_bytes == 8 * COLUMNS * 4


@needs_gpu
def test_both_directions_of_a_link_reach_the_planner() -> None:
    there = target("gh200")
    assert there.link == Link(device_to_host=170e9, host_to_device=411e9)
    slowest, fastest = there.link_range
    assert slowest == Link(device_to_host=85e9, host_to_device=171e9)
    assert fastest == Link(device_to_host=295e9, host_to_device=421e9)


@needs_gpu
def test_the_memory_that_jax_may_take_is_the_users_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    fresh = _target._gpu_target.__wrapped__("h100", _target.CHIPS["h100"], 1)
    assert fresh.device_bytes == int(fresh.memory_bytes * 0.9)
    assert fresh.pinned_bytes == 64 * 2**30


# --- what goes wrong, and what is said then -----------------------------------------


# --- the list, and the surroundings -------------------------------------------------


def test_every_listed_name_is_taken() -> None:
    names = [record.name for record in targets()]
    assert len(set(names)) == len(names)
    assert {"cpu", "v4-8", "v5e-4", "v5p-8", "v6e-256", "h100", "h200x8"} <= set(names)
    for record in targets():
        if (
            record.platform == "tpu"
            and not record.attached
            and _jax_targets.has_libtpu()
        ):
            assert target(record.name).device_count == record.device_count


def test_the_table_has_a_row_per_chip_and_says_what_is_unknown() -> None:
    rows = {row.chip.key: row for row in targets_table()}
    assert rows["cpu"].attached
    assert "v5litepod-16" in rows["v5e"].names
    assert not dict(rows["7x"].chip.figures())["link device to host"].known
    assert sum(len(row.names) for row in rows.values()) == len(targets())


def test_the_names_print_as_the_command_prints_them():
    found = targets()
    assert str(found) == repr(found) == targets_text(targets_table())
    assert {record.name for record in found} >= {"v5p-8", "h200"}
    assert isinstance(found, tuple)


def test_other_peoples_words_on_stderr_are_kept(capfd: pytest.CaptureFixture) -> None:
    with quiet_native_log():
        os.write(2, b"I0000 cudart_stub.cc:31] Could not find cuda drivers\n")
        os.write(2, b"something that matters\n")
    assert capfd.readouterr().err == "something that matters\n"


LAPTOP = textwrap.dedent(
    """
    import jax, jax.numpy as jnp
    from stowax import _jax_targets
    from stowax._target import _target
    print("---", file=__import__("sys").stderr, flush=True)
    if _jax_targets.has_libtpu():
        assert _target.target("v5p-8").device_count == 4
    if _jax_targets.cuda_plugin() is not None:
        eight = _target.target("h100x8")
        split = eight.sharding("x", mesh=eight.mesh((8,), ("x",)))
        spec = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=split)
        memory = eight.compile(jax.jit(jnp.sin), spec).memory_analysis()
        assert memory.argument_size_in_bytes == 64 * 64 * 4 // 8
    print(jax.default_backend(), len(jax.devices()))
    """
)


@pytest.mark.skipif(
    _jax_targets.tpu_attached() or _jax_targets.nvidia_gpu_attached(),
    reason="an accelerator is attached",
)
def test_a_laptop_needs_no_settings_and_stays_a_laptop() -> None:
    settings = ("JAX_", "TPU_", "XLA_", "ALLOW_MULTIPLE")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(settings)}
    done = subprocess.run(
        [sys.executable, "-c", LAPTOP], env=kept, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["cpu", "1"]
    # What `import jax` says is not ours; after that there is silence.
    assert done.stderr.partition("---\n")[2] == ""


def test_a_target_is_one_line_in_a_notebook():
    assert repr(target("v5p-8")).startswith(
        "Target('v5p-8', compile-only, 4 devices of "
    )
    assert repr(target("cpu")).startswith("Target('cpu', attached, 8 devices of ")
    assert repr(target("cpu")).endswith(" of host memory)")
