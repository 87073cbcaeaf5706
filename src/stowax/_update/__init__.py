"""Running the part of a step that updates its state block by block."""
