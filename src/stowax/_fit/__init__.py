"""The largest batch that fits a budget, and what each size costs."""
