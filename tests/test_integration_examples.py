"""The scripts of `docs/integrations` run, and the plan changes none of their numbers.

Each script compares its own losses with and without a plan; Keras's has no word of
stowax in it, so it runs twice. A framework that is not installed is skipped.
"""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
SCRIPTS = ROOT / "examples" / "integrations"
SCRIPT = {
    "../diffusion_unet.py": ("flax", "optax"),
    "../long_llama.py": ("optax",),
    "../ppo.py": ("optax",),
    "equinox_vit.py": ("equinox", "optax"),
    "haiku_lm.py": ("haiku", "optax"),
    "linen_lm.py": ("flax", "optax"),
    "multisteps.py": ("optax",),
    "nnx_lm.py": ("flax", "optax"),
    "orbax_grain.py": ("grain", "orbax.checkpoint"),
    "tunix_lora.py": ("tunix", "qwix"),
}


def run(*words, code=0, **variables):
    # One device, as a reader has; compiled as cheaply as all tests' programs.
    cheap = {"JAX_OPTIMIZATION_LEVEL": "O0"}
    environment = {**os.environ, **cheap, "JAX_PLATFORMS": "cpu", **variables}
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def need(*modules):
    """Skips without them. Not by an import: Keras would want TensorFlow in here."""
    for module in modules:
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            pytest.skip(f"{module} is not installed")


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPT)
def test_script_has_the_same_losses_under_a_plan(script):
    need(*SCRIPT[script])
    said = run(SCRIPTS / script).stdout
    assert "FITS: " in said
    plain, planned = (
        re.search(rf"^{word} +(.*)$", said, re.MULTILINE)[1]
        for word in ("plain", "planned")
    )
    assert len(plain.split()) >= 8
    assert len(planned.split()) == len(plain.split())


def keras_losses(said):
    found = re.findall(r"^((?:val_)?loss) +(.*)$", said, re.MULTILINE)
    return {name: [float(x) for x in values.split()] for name, values in found}


@pytest.mark.slow
def test_keras_fit_under_stowax_run():
    need("keras")
    script = SCRIPTS / "keras_lm.py"
    plain = run(script)
    planned = run("-m", "stowax", "run", "--budget", "60%", script)
    assert "FITS: " in planned.stderr
    losses = keras_losses(plain.stdout)
    assert set(losses) == {"loss", "val_loss"}
    for name, values in keras_losses(planned.stdout).items():
        assert values == pytest.approx(losses[name], rel=1e-4)


MAXTEXT = [
    "run_name=tiny",
    "hardware=cpu",
    "dataset_type=synthetic",
    "steps=4",
    "enable_checkpointing=false",
    "skip_jax_distributed_system=true",
    "base_emb_dim=128",
    "base_num_query_heads=4",
    "base_num_kv_heads=4",
    "base_mlp_dim=512",
    "head_dim=32",
    "base_num_decoder_layers=4",
    "vocab_size=256",
    "per_device_batch_size=8",
    "max_target_length=128",
    "attention=dot_product",
    "dtype=float32",
    "enable_goodput_recording=false",
    "monitor_goodput=false",
    "log_config=false",
    "enable_tensorboard=false",
    "remat_policy=minimal_with_context",
]


def test_maxtext_trains_under_stowax_run(tmp_path):
    need("maxtext")
    (folder,) = importlib.util.find_spec("maxtext").submodule_search_locations
    base = pathlib.Path(folder) / "configs" / "base.yml"
    words = [
        "maxtext.trainers.pre_train.train",
        base,
        f"base_output_directory={tmp_path}",
        *MAXTEXT,
    ]
    options = {"DECOUPLE_GCLOUD": "TRUE"}
    stowax_run = ("-m", "stowax", "run", "--budget", "90%", "-m")
    found = {}
    for name, way in {"plain": ("-m",), "planned": stowax_run}.items():
        done = run(*way, *words, **options)
        said = done.stdout + done.stderr
        steps = re.findall(r"completed step: (\d+).*?\bloss: ([\d.]+)", said)
        found[name] = {int(step): float(loss) for step, loss in steps}
    assert "FITS: " in said  # of the planned run
    assert sorted(found["plain"]) == [0, 1, 2, 3]
    assert found["planned"] == pytest.approx(found["plain"], rel=1e-3)
