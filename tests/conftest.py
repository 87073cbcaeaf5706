"""Settings for every test: eight CPU devices, no implicit promotion, no lucky seeds.

All of it has to happen before JAX starts a backend, which is why it stands at the top
of this file and not in fixtures. `JAX_PLATFORMS=cuda,cpu` from outside runs the same
tests on an attached GPU; without it they run on the CPU, whatever is attached.
"""

import gc
import importlib.metadata
import os
import pathlib
import signal

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if os.environ["JAX_PLATFORMS"] == "cpu":
    # Half of the time of all tests went into making programs fast that run once.
    flags = (
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        # Without a GPU nothing can be timed: jaxlib 0.12 tries, and takes the same.
        "--xla_gpu_autotune_level=0",
    )
    if importlib.metadata.version("jaxlib").startswith("0.10."):  # 0.11 has no others
        flags += (
            "--xla_cpu_use_fusion_emitters=false",
            "--xla_cpu_parallel_codegen_split_count=1",
        )
    os.environ.setdefault("XLA_FLAGS", " ".join(flags))
# A shell has what it runs in the background ignore interrupts, and its children, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# What somebody measured on this machine is not what tests expect.
os.environ["STOWAX_CALIBRATION"] = os.path.join(os.devnull, "none")
# Nor are plans that were kept there before.
os.environ["XDG_CACHE_HOME"] = os.path.join(os.devnull, "none")

import contextlib

import hypothesis
import jax
import pytest

# What tests import stays: a third of the time of collecting them went into finding that
# out again and again. `pytest_collection_finish` turns it on.
gc.disable()
if os.environ["JAX_PLATFORMS"] == "cpu":
    # Nothing runs what is compiled for a GPU, so `ptxas` does nothing: it took a third
    # of the time of compiling. JAX 0.10 to 0.12 say by this where it is.
    jax._src.lib.cuda_path = str(pathlib.Path(__file__).parent / "cuda")
# Also set here: the variable is not read again if something imported jax before us.
jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
jax.config.update("jax_num_cpu_devices", 8)
# A TPU's program takes a tenth of the time to compile so, and its memory is about the
# same. `full_effort` is for tests that look at what the compiler makes of a schedule.
jax.config.update("jax_optimization_level", "O0")
# What promotes silently doubles the bytes silently.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# A deadline would make a test depend on timing. In CI the examples are always the same.
hypothesis.settings.register_profile(
    "stowax",
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("stowax")


@pytest.fixture
def full_effort():
    """TPU programs as users get them."""
    jax.config.update("jax_optimization_level", "UNKNOWN")
    yield
    jax.config.update("jax_optimization_level", "O0")


@pytest.fixture
def usual_promotion():
    """JAX's usual promotion, for models of libraries that rely on it."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.numpy_dtype_promotion("standard"))
        stack.enter_context(jax.numpy_rank_promotion("allow"))
        yield


_LONGEST = (
    "test_tutorial.py",
    "test_site.py",
    "test_integration_examples.py",
    "test_optimizers.py",
    "test_random_programs.py",
    "test_jit.py",
    "test_plan.py",
    "test_state_parameters.py",
    "test_jit_frameworks.py",
    "test_returned_gradients.py",
    "test_jit_places.py",
    "test_planning.py",
    "test_planning_command.py",
    "test_forms.py",
    "test_state.py",
    "test_state_frozen.py",
    "test_rewrite_layers.py",
    "test_host_layers.py",
    "test_state_mesh.py",
    "test_several_budgets.py",
    "test_verify.py",
    "test_small_models.py",
    "test_random_steps.py",
    "test_models.py",
    "test_gpu_benchmark.py",
    "test_foreign_devices.py",
    "test_jax_donation.py",
    "test_workloads.py",
    "test_result_types.py",
)
"""Files that take longest, in this order: from two minutes to a quarter of one."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """The longest files first; what needs a GPU is skipped where there is none.

    A file is run by one process. Begun last, a long one is all that runs in the end.
    Of a test that names its quick cases all others are slow: this comes before pytest
    chooses by `-m`.
    """
    for item in items:
        quick = item.get_closest_marker("quick")
        if quick and item.callspec.id not in quick.args:
            item.add_marker(pytest.mark.slow)
    place = {name: number for number, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and jax.default_backend() != "gpu":
        skip = pytest.mark.skip(reason="no attached GPU (JAX_PLATFORMS=cuda,cpu)")
        for item in marked:
            item.add_marker(skip)


def pytest_collection_finish():
    """Collections begin, less often than Python's own settings have them.

    These are for programs that make fewer objects than a trace does.
    """
    gc.set_threshold(20_000, 10, 5)
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def what_is_alive_stays():
    """No collection looks again at what earlier files have left, most in JAX's caches.

    Audits and tests of leaks ask for many collections. Late in a run of all tests those
    of audits took five times as long for it.
    """
    gc.collect()
    gc.freeze()
