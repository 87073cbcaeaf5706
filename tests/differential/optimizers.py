"""Optimizers: `init(params)` and `update(params, state, grads, rate)`.

Those written by hand read old and new state around norms, in every order: what is
updated in blocks must not read what an earlier block has written.
"""

import jax
import jax.numpy as jnp
import optax

T = jax.tree.map


def _norm(tree):
    return jnp.sqrt(sum(jnp.sum(jnp.square(a)) for a in jax.tree.leaves(tree)))


def _zeros(params):
    return T(jnp.zeros_like, params)


def _none(params):
    return ()


def _sgd(p, s, g, rate):
    return T(lambda p, g: p - rate * g, p, g), s


def _momentum(p, m, g, rate):
    m = T(lambda m, g: 0.9 * m + g, m, g)
    return T(lambda p, m: p - rate * m, p, m), m


def _moments(params):
    return {"m": _zeros(params), "v": _zeros(params), "count": jnp.int32(0)}


def _adam_direction(s, g):
    count = s["count"] + 1
    m = T(lambda m, g: 0.9 * m + 0.1 * g, s["m"], g)
    v = T(lambda v, g: 0.99 * v + 0.01 * g * g, s["v"], g)
    scale = lambda a, b: a / (1 - b ** count.astype(a.dtype))
    # A large epsilon: what is zero but for rounding stays small.
    u = T(lambda m, v: scale(m, 0.9) / (jnp.sqrt(scale(v, 0.99)) + 1e-3), m, v)
    return u, {"m": m, "v": v, "count": count}


def _adam(p, s, g, rate):
    u, s = _adam_direction(s, g)
    return T(lambda p, u: p - rate * u, p, u), s


def _soft_sign(a):
    """A sign that is continuous: rounding of what is zero is not amplified."""
    return a / (jnp.abs(a) + 1e-3)


def _lion_direction(m, g):
    u = T(lambda m, g: _soft_sign(0.9 * m + 0.1 * g), m, g)
    return u, T(lambda m, g: 0.99 * m + 0.01 * g, m, g)


def _lion(p, m, g, rate):
    u, m = _lion_direction(m, g)
    return T(lambda p, u: p - rate * u, p, u), m


def _trust_ratio(p, s, g, rate):
    u, s = _adam_direction(s, g)
    ratio = T(lambda p, u: (_norm(p) + 0.1) / (_norm(u) + 0.1), p, u)
    return T(lambda p, u, r: p - rate * r * u, p, u, ratio), s


def _lion_normed(p, m, g, rate):
    u, new = _lion_direction(m, g)
    scale = rate / (1 + _norm(g))
    return T(lambda p, u: p - scale * u, p, u), new


def _lion_skip(p, m, g, rate):
    u, new = _lion_direction(m, g)
    good = _norm(g) < 1e9
    return T(lambda p, u: jnp.where(good, p - rate * u, p), p, u), new


def _lars(p, m, g, rate):
    u, new = _lion_direction(m, g)
    scale = 0.1 * rate * _norm(p)
    return T(lambda p, u: p - scale * u, p, u), new


def _old_momentum(p, m, g, rate):
    scale = rate * jnp.minimum(1.0, 1 / (_norm(g) + 1e-6))
    return T(lambda p, m: p - scale * m, p, m), T(lambda m, g: 0.9 * m + g, m, g)


def _anchor(p, e, g, rate):
    clip = jnp.minimum(1.0, 1 / (_norm(g) + 1e-6))
    new = T(lambda p, e, g: p - rate * (g * clip + 0.1 * (p - e)), p, e, g)
    return new, T(lambda e, p: 0.9 * e + 0.1 * p, e, p)


def _delayed(p, s, g, rate):
    clip = jnp.minimum(1.0, 1 / (_norm(s) + 1e-6))
    return T(lambda p, a: p - rate * a * clip, p, s), g


def _clip_first(p, m, g, rate):
    clip = jnp.minimum(1.0, 0.1 / (_norm(g) + 1e-6))
    return _momentum(p, m, T(lambda g: g * clip, g), rate)


def _adam_clipped_update(p, s, g, rate):
    u, s = _adam_direction(s, g)
    clip = jnp.minimum(1.0, 1 / (_norm(u) + 1e-6))
    return T(lambda p, u: p - rate * clip * u, p, u), s


def _masked_where(p, m, g, rate):
    new, m = _momentum(p, m, g, rate)
    return T(lambda p, n: jnp.where(jnp.abs(p) < 3, n, 0.99 * p), p, new), m


BY_HAND = {
    "sgd": (_none, _sgd),
    "momentum": (_zeros, _momentum),
    "adam": (_moments, _adam),
    "lion": (_zeros, _lion),
    "trust ratio": (_moments, _trust_ratio),
    "lion normed": (_zeros, _lion_normed),
    "lion skip": (_zeros, _lion_skip),
    "lars": (_zeros, _lars),
    "old momentum": (_zeros, _old_momentum),
    "anchor": (lambda params: T(lambda p: 1.1 * p, params), _anchor),
    "delayed": (_zeros, _delayed),
    "clip first": (_zeros, _clip_first),
    "adam clipped update": (_moments, _adam_clipped_update),
    "masked where": (_zeros, _masked_where),
}

_EPS = 1e-3
OPTAX = {
    "optax sgd": lambda r: optax.sgd(r),
    "optax momentum": lambda r: optax.sgd(r, momentum=0.9, nesterov=True),
    "optax adam": lambda r: optax.adam(r, eps=_EPS),
    "optax adamw": lambda r: optax.adamw(r, eps=_EPS, weight_decay=0.01),
    "optax lion": lambda r: optax.lion(0.1 * r),
    "optax adafactor": lambda r: optax.adafactor(r, min_dim_size_to_factor=4),
    "optax lamb": lambda r: optax.lamb(r, eps=_EPS),
    "optax clip adam": lambda r: optax.chain(
        optax.clip_by_global_norm(0.1), optax.adam(r, eps=_EPS)
    ),
    "optax adam clip": lambda r: optax.chain(
        optax.scale_by_adam(eps=_EPS), optax.clip_by_global_norm(1.0), optax.scale(-r)
    ),
    "optax accumulate": lambda r: optax.MultiSteps(optax.adam(r, eps=_EPS), 2),
    "optax injected": lambda r: optax.inject_hyperparams(optax.adam)(r, eps=_EPS),
    "optax if finite": lambda r: optax.apply_if_finite(optax.adam(r, eps=_EPS), 3),
    "optax schedule": lambda r: optax.adam(
        optax.warmup_cosine_decay_schedule(0.1 * r, r, 2, 10), eps=_EPS
    ),
}


def optimizer_of(name):
    """`(init, update)`; `update` ignores a rate that is built in."""
    if name in BY_HAND:
        return BY_HAND[name]
    made = OPTAX[name](0.05)

    def update(params, state, grads, rate):
        changes, state = made.update(grads, state, params)
        return optax.apply_updates(params, changes), state

    return made.init, update
