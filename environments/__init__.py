"""Example environments: one small package each, with its tasks, its README and its test."""
