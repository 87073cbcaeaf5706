"""The closed loop: decide, compile, compare, decide again."""
