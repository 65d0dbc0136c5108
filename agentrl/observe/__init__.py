"""Metrics and progress."""
