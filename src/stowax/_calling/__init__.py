"""How a step is called: whatever it takes and returns, as a function of arrays."""
