"""The training step, traced once: what its arguments are for, and its stacks."""
