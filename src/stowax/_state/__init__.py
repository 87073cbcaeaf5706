"""The step's state: what could wait in host memory, and how the step runs then."""
