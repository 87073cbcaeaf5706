"""Evaluating a marked function with its repeated layers as loops that store by plan.

Where layers' weights lie in host memory, the loops fetch them (`_host_…`).
"""
