"""The closed loop: decide, compile, compare, decide again, and say why."""
