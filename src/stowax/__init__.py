"""stowax: a stowage plan for the arrays of a JAX training step."""
