"""One program: compiled, read, and every planned copy found in it."""
