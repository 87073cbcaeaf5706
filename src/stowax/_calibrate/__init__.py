"""Measuring what an attached machine reaches."""
