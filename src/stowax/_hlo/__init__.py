"""A compiled program, read: XLA's messages, loops, copies, buffers; no JAX."""
