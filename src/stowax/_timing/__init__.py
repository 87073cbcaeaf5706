"""When a step computes and when it waits: simulated from a schedule, or measured."""
