"""Metrics and displays of a run's progress."""
