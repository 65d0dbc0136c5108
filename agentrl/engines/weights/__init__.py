"""Weights on their way from the trainer to an engine."""
