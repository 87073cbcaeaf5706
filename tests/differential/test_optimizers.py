"""Every optimizer of optax and optax.contrib trains the same with its state offloaded.

Parameters, gradients and state are in host memory, where an H200's plan may put them;
no search is made, which would ask for seconds each. Three steps planned are three steps
unplanned: each optimizer as it is, after a clip of the gradients by their norm, and
before a clip of the updates. Each of the three has norms in other places, so the
streamed update reads and writes state in other loops: each optimizer gets one of them,
in turn, and all with `STOWAX_DIFFERENTIAL=full`. Programs run on the CPU, so this says
nothing about savings.

Tolerance: sums are made block by block, so their last digits differ, and three steps
carry that on: 256 units in the last place of the largest element.
"""

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib as contrib
import pytest

import stowax
from differential.decide import offload_everything, surveyed
from differential.programs import Wishes

pytestmark = pytest.mark.usefixtures("usual_promotion")

LAYERS, WIDTH, ROWS, STEPS = 4, 64, 16, 3
RATE = 1e-2
UNITS = 256
FULL = os.environ.get("STOWAX_DIFFERENTIAL") == "full"
Transformation = Any


def scaled(*parts: Transformation) -> Transformation:
    """Transformations that only make directions, as an optimizer."""
    return optax.chain(*parts, optax.scale(-RATE))


def labels(params: Any) -> Any:
    return {key: "a" if key == "w" else "b" for key in params}


def two(params: Any) -> Any:
    return {key: key == "w" for key in params}


def schedule() -> Any:
    return optax.warmup_cosine_decay_schedule(0.0, RATE, 2, 10)


def when(step: Any, *_: Any, **__: Any) -> Any:
    return step % 2 == 0


ALIASES = (
    "adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan amsgrad "
    "fromage lamb lars lion nadam nadamw noisy_sgd novograd optimistic_adam_v2 "
    "optimistic_gradient_descent radam rmsprop rprop sgd sign_sgd signum sm3 yogi"
)
CONTRIB = (
    "acprop ademamix adopt galore madgrad muon schedule_free_adamw schedule_free_sgd "
    "simplified_ademamix sophia"
)
DIRECTIONS = "distance_over_gradients param_block_norm param_block_rms trust_ratio"
"""Those that no alias above is made of: it has a rate besides, and a decay."""

OPTIMIZERS: dict[str, Callable[[], Transformation]] = {
    **{n: lambda n=n: getattr(optax, n)(learning_rate=RATE) for n in ALIASES.split()},
    **{n: lambda n=n: getattr(contrib, n)(learning_rate=RATE) for n in CONTRIB.split()},
    **{
        f"scale_by_{n}": lambda n=n: scaled(getattr(optax, f"scale_by_{n}")())
        for n in DIRECTIONS.split()
    },
    # Those whose numbers depend on more than a learning rate.
    "momentum": lambda: optax.sgd(RATE, momentum=0.9),
    "nesterov": lambda: optax.sgd(RATE, momentum=0.9, nesterov=True),
    "narrow momentum": lambda: optax.adam(RATE, mu_dtype=jnp.bfloat16),
    "centered rmsprop": lambda: optax.rmsprop(RATE, centered=True, momentum=0.9),
    "factored": lambda: optax.adafactor(RATE, min_dim_size_to_factor=32, momentum=0.9),
    "scheduled": lambda: optax.adamw(schedule()),
    "polyak_sgd": lambda: optax.polyak_sgd(max_learning_rate=RATE),
    "lbfgs": lambda: optax.lbfgs(RATE, memory_size=2, linesearch=None),
    "backtracking": lambda: optax.chain(
        optax.sgd(RATE), optax.scale_by_backtracking_linesearch(3)
    ),
    "zoom": lambda: optax.lbfgs(memory_size=2),
    "cocob": contrib.cocob,
    "dadapt_adamw": contrib.dadapt_adamw,
    "prodigy": contrib.prodigy,
    "momo": lambda: contrib.momo(RATE),
    "momo_adam": lambda: contrib.momo_adam(RATE),
    "mechanize": lambda: contrib.mechanize(optax.adam(RATE)),
    "schedule_free": lambda: contrib.schedule_free(optax.adam(RATE), RATE),
    "sam": lambda: contrib.sam(
        optax.adam(RATE),
        optax.chain(contrib.normalize(), optax.sgd(0.05)),
        sync_period=2,
    ),
    "reduce_on_plateau": lambda: optax.chain(
        optax.adam(RATE), contrib.reduce_on_plateau(patience=1)
    ),
    "normalize": lambda: optax.chain(contrib.normalize(), optax.sgd(RATE)),
    "split_real_and_imaginary": lambda: contrib.split_real_and_imaginary(
        optax.adam(RATE)
    ),
    # What wraps, gates, averages or perturbs another one.
    "add_decayed_weights": lambda: scaled(optax.add_decayed_weights(0.1)),
    "add_noise": lambda: scaled(optax.add_noise(0.01, 0.5, 0)),
    "adaptive_grad_clip": lambda: optax.chain(
        optax.adaptive_grad_clip(0.1), optax.adam(RATE)
    ),
    "apply_every": lambda: optax.chain(optax.adam(RATE), optax.apply_every(2)),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(RATE), 2),
    "centralize": lambda: scaled(optax.centralize()),
    "clip": lambda: optax.chain(optax.clip(0.01), optax.adam(RATE)),
    "clip_by_block_rms": lambda: scaled(
        optax.scale_by_adam(), optax.clip_by_block_rms(0.5)
    ),
    "conditionally_mask": lambda: optax.conditionally_mask(optax.adam(RATE), when),
    "conditionally_transform": lambda: optax.conditionally_transform(
        optax.adam(RATE), when
    ),
    "ema": lambda: optax.chain(optax.adam(RATE), optax.ema(0.9)),
    "flatten": lambda: optax.flatten(optax.adam(RATE)),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(RATE),
    "injected schedule": lambda: optax.inject_hyperparams(optax.lion)(schedule()),
    "keep_params_nonnegative": lambda: optax.chain(
        optax.adam(RATE), optax.keep_params_nonnegative()
    ),
    "masked": lambda: optax.masked(optax.adam(RATE), two),
    "multi_transform": lambda: optax.multi_transform(
        {"a": optax.adam(RATE), "b": optax.lion(RATE)}, labels
    ),
    "every second step": lambda: optax.MultiSteps(optax.adam(RATE), 2),
    "normalize_by_update_norm": lambda: scaled(
        optax.scale_by_adam(), optax.normalize_by_update_norm()
    ),
    "selective_transform": lambda: optax.selective_transform(
        optax.adam(RATE), freeze_mask={"w": False, "b": True}
    ),
    "set_to_zero": optax.set_to_zero,
    "trace": lambda: scaled(optax.trace(0.9, nesterov=True)),
    "zero_nans": lambda: optax.chain(optax.zero_nans(), optax.adam(RATE)),
    "lookahead": lambda: optax.lookahead(optax.adam(RATE), 2, 0.5),
}

EXTRA = {
    **dict.fromkeys(("polyak_sgd", "momo", "momo_adam"), ("value",)),
    "reduce_on_plateau": ("value",),
    "sophia": ("obj_fn",),
    **dict.fromkeys(("backtracking", "zoom"), ("value", "grad", "value_fn")),
}
"""What an optimizer's `update` is given besides."""

STAYING = ("backtracking", "zoom")
"""Optimizers that run the loss once more: it would read what is offloaded."""

KNOWN_REFUSALS = {
    "set_to_zero": "its gradients reach none of its outputs",
}
"""Optimizers that cannot be planned, each with a part of what the error says."""

FORMS: dict[str, Callable[[Transformation], Transformation]] = {
    "bare": lambda tx: tx,
    "clip before": lambda tx: optax.chain(optax.clip_by_global_norm(0.1), tx),
    "clip after": lambda tx: optax.chain(tx, optax.clip_by_global_norm(0.05)),
}

QUICK = {("adamw", "bare"), ("acprop", "clip after"), ("lion", "clip after")}


@stowax.stow
def loss_of(params: Any, x: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        return x + jnp.tanh(x @ w), None

    if isinstance(params, optax.LookaheadParams):
        params = params.fast
    x, _ = jax.lax.scan(layer, x, params["w"])
    return jnp.mean((x + params["b"] - 1) ** 2)


def training(name: str, tx: Transformation) -> tuple[Any, Any, Any]:
    """A step with this optimizer, its first state and a batch."""
    keys = jax.random.split(jax.random.key(0), 2)
    params = {
        "w": jax.random.normal(keys[0], (LAYERS, WIDTH, WIDTH)) / 8,
        "b": jnp.full((WIDTH,), 0.1, jnp.float32),
    }
    x = jax.random.normal(keys[1], (ROWS, WIDTH))
    tx, asked = optax.with_extra_args_support(tx), EXTRA.get(name, ())

    def step(state: Any, x: Any) -> Any:
        params, inner = state
        loss, grads = jax.value_and_grad(loss_of)(params, x)
        if isinstance(params, optax.LookaheadParams):
            grads = grads.fast
        known = {"value": loss, "grad": grads}
        known |= dict.fromkeys(("value_fn", "obj_fn"), lambda p: loss_of(p, x))
        extra = {key: known[key] for key in asked}
        updates, inner = tx.update(grads, inner, params, **extra)
        return (optax.apply_updates(params, updates), inner), loss

    if name == "lookahead":
        params = optax.LookaheadParams.init_synced(params)
    return step, (params, tx.init(params)), x


def check(name: str, form: str) -> None:
    made = OPTIMIZERS[name]()
    if isinstance(made, optax.MultiSteps):
        made = made.gradient_transformation()
    tx = FORMS[form](made)
    step, state, x = training(name, tx)
    copied = jax.tree.map(jnp.copy, state)
    expected, plain = [], jax.jit(step)
    for _ in range(STEPS):
        state, loss = plain(state, x)
        expected.append(jax.tree.map(jnp.copy, (state, loss)))
    survey = surveyed(step, (copied, x), {}, Wishes(target="h200"), 2**20)
    offloaded = offload_everything(survey)
    moves = any(word.startswith("offload") for word in offloaded.moved)
    assert moves == (name not in STAYING)
    state, x = offloaded.place((copied, x))
    for k in range(STEPS):
        state, loss = offloaded.step(state, x)
        same(expected[k], (state, loss), f"step {k}")


def same(expected: Any, got: Any, where: str) -> None:
    pairs = zip(jax.tree.leaves_with_path(expected), jax.tree.leaves(got), strict=True)
    for (path, a), b in pairs:
        name = f"{where}: {jax.tree_util.keystr(path)}"
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        if not jnp.issubdtype(a.dtype, jnp.inexact):
            np.testing.assert_array_equal(a, np.asarray(b), err_msg=name)
            continue
        scale = max(1.0, float(np.max(np.abs(a), initial=0.0)))
        tolerance = UNITS * float(jnp.finfo(a.dtype).eps) * scale
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance, err_msg=name)


def forms_of(number: int, name: str) -> list[str]:
    """The forms that an optimizer is tested in."""
    turn = list(FORMS)[number % len(FORMS)]
    return [form for form in FORMS if FULL or form == turn or (name, form) in QUICK]


CASES = [
    pytest.param(
        *(name, form),
        marks=() if (name, form) in QUICK else pytest.mark.slow,
        id=f"{name}-{form}",
    )
    for number, name in enumerate(OPTIMIZERS)
    for form in forms_of(number, name)
]


@pytest.mark.filterwarnings("ignore:Specifying a key will be required")
@pytest.mark.parametrize(("name", "form"), CASES)
def test_three_steps_are_those_without_a_plan(name, form):
    if name in KNOWN_REFUSALS:
        with pytest.raises(stowax.StowaxError, match=KNOWN_REFUSALS[name]):
            check(name, form)
    else:
        check(name, form)


def test_nothing_of_optax_is_left_out():
    """A new optimizer of a new optax has to be added here."""
    known = " ".join((*OPTIMIZERS, ALIASES, CONTRIB, "optimistic_adam"))
    for name in vars(optax):
        module = getattr(getattr(optax, name), "__module__", "")
        if module == "optax._src.alias" and name[0].islower():
            assert name in known
