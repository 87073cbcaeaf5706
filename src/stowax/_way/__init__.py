"""What is in the way of a step that does not fit, and what could be done about it."""
