"""`audit`: the transfers and stalls of a running training loop."""
