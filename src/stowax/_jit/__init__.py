"""`stowax.jit`: what `jax.jit` is, with a budget."""
