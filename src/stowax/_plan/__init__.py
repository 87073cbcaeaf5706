"""`plan`, the front door, and the `Plan` that comes out of it."""
