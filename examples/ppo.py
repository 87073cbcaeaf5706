"""Reinforcement learning with PPO: a whole iteration is one jitted step.

    python examples/ppo.py                          # tiny, on this machine
    stowax plan examples/ppo.py:real --target h200 --budget 24GiB

Environments run inside of the step: a scan over time plays, a scan over time backwards
estimates advantages, and scans over epochs and minibatches learn. Memory is that of one
minibatch's gradient, deep inside; a plan decides there.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from integrations.common import compare, options

import stowax


@dataclasses.dataclass(frozen=True)
class Config:
    """How much is played and learned in one iteration, and by which network."""

    environments: int = 64
    steps: int = 16
    epochs: int = 2
    minibatches: int = 4
    layers: int = 4
    width: int = 64
    observed: int = 8
    actions: int = 4


TINY = Config()
REAL = Config(16_384, 128, 4, 8, 8, 1024, 128, 16)


class Transition(NamedTuple):
    """What was seen, done and paid at one moment in every environment."""

    observation: jax.Array
    action: jax.Array
    likelihood: jax.Array
    value: jax.Array
    reward: jax.Array


def parameters(key: jax.Array, config: Config) -> Any:
    """Weights of a residual network with two heads."""
    keys = jax.random.split(key, 5)
    shape = (config.layers, config.width, config.width)
    return {
        "in": 0.3 * jax.random.normal(keys[0], (config.observed, config.width)),
        "up": 0.1 * jax.random.normal(keys[1], shape),
        "down": 0.1 * jax.random.normal(keys[2], shape),
        "actor": 0.01 * jax.random.normal(keys[3], (config.width, config.actions)),
        "critic": 0.1 * jax.random.normal(keys[4], (config.width, 1)),
    }


def network(params: Any, observation: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Logits of the actions, and what the future is worth."""

    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        y = x - jnp.mean(x, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-5)
        return x + jax.nn.gelu(y @ w["up"]) @ w["down"], None

    x = observation @ params["in"]
    x, _ = jax.lax.scan(layer, x, {"up": params["up"], "down": params["down"]})
    return x @ params["actor"], (x @ params["critic"])[..., 0]


def play(state: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A point that each action pushes another way; it pays to be near the origin."""
    push = jnp.sin(jnp.arange(state.shape[-1]) + action[:, None].astype(state.dtype))
    state = 0.95 * state + 0.1 * push
    return state, -jnp.mean(state * state, axis=-1)


def chosen(logits: jax.Array, action: jax.Array) -> jax.Array:
    """The log-likelihood of the actions taken."""
    every = jax.nn.log_softmax(logits)
    return jnp.take_along_axis(every, action[:, None], axis=-1)[:, 0]


def loss_fn(params: Any, batch: tuple[Transition, jax.Array]) -> jax.Array:
    """PPO's clipped objective, the critic's error, and the entropy's share."""
    seen, advantage = batch
    logits, value = network(params, seen.observation)
    ratio = jnp.exp(chosen(logits, seen.action) - seen.likelihood)
    clipped = jnp.clip(ratio, 0.8, 1.2)
    worth = (advantage - jnp.mean(advantage)) / (jnp.std(advantage) + 1e-8)
    actor = -jnp.mean(jnp.minimum(ratio * worth, clipped * worth))
    critic = jnp.mean((value - (seen.value + advantage)) ** 2)
    entropy = jnp.mean(optax.softmax_cross_entropy(logits, jax.nn.softmax(logits)))
    return actor + 0.5 * critic - 0.01 * entropy


def make(config: Config) -> tuple[Any, Any]:
    """One iteration as a step, and a function that makes its state."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-4))

    def iteration(params: Any, state: Any, world: jax.Array, key: jax.Array) -> Any:
        def moment(world: jax.Array, key: jax.Array) -> tuple[jax.Array, Transition]:
            logits, value = network(params, world)
            action = jax.random.categorical(key, logits)
            after, reward = play(world, action)
            found = chosen(logits, action)
            return after, Transition(world, action, found, value, reward)

        def earlier(later: Any, seen: Transition) -> tuple[Any, jax.Array]:
            advantage, value = later
            error = seen.reward + 0.99 * value - seen.value
            advantage = error + 0.99 * 0.95 * advantage
            return (advantage, seen.value), advantage

        def learn(held: Any, batch: Any) -> tuple[Any, jax.Array]:
            params, state = held
            loss, gradients = jax.value_and_grad(loss_fn)(params, batch)
            updates, state = optimizer.update(gradients, state, params)
            return (optax.apply_updates(params, updates), state), loss

        def epoch(held: Any, key: jax.Array) -> tuple[Any, jax.Array]:
            order = jax.random.permutation(key, config.environments * config.steps)
            order = order.reshape(config.minibatches, -1)
            return jax.lax.scan(
                lambda held, rows: learn(held, jax.tree.map(lambda x: x[rows], flat)),
                held,
                order,
            )

        playing, learning = jax.random.split(key)
        world, seen = jax.lax.scan(
            moment, world, jax.random.split(playing, config.steps)
        )
        last = network(params, world)[1]
        start = (jnp.zeros_like(last), last)
        _, advantages = jax.lax.scan(earlier, start, seen, reverse=True)
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (seen, advantages))
        (params, state), losses = jax.lax.scan(
            epoch, (params, state), jax.random.split(learning, config.epochs)
        )
        return params, state, world, jnp.mean(losses)

    def init() -> Any:
        params = parameters(jax.random.key(0), config)
        world = jax.random.normal(
            jax.random.key(1), (config.environments, config.observed)
        )
        return params, optimizer.init(params), world

    return iteration, init


def real() -> tuple[Any, Any]:
    """16,384 environments and a network of 17 million weights, for `stowax plan`."""
    step, init = make(REAL)
    return step, (*jax.eval_shape(init), jax.eval_shape(lambda: jax.random.key(0)))


def main() -> None:
    """Plays and learns twice."""
    asked = options()
    step, init = make(TINY)
    planned = stowax.jit(
        step, budget=asked.budget, target=asked.target, donate_argnums=(0, 1, 2)
    )

    def train(step: Any) -> list[float]:
        (params, state, world), losses = init(), []
        for key in jax.random.split(jax.random.key(2), asked.steps):
            params, state, world, loss = step(params, state, world, key)
            losses.append(float(loss))
        return losses

    plain, other = train(jax.jit(step)), train(planned)
    compare([planned.plan], plain, other)


if __name__ == "__main__":
    main()
