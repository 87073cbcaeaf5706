"""What a lowered step will need of device memory, before it is compiled; no JAX."""
