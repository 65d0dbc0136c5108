"""Engines in separate processes."""
