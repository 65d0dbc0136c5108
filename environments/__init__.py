"""Example environments, imported as `agentrl.environments`: one small package each, with tasks, README and test."""
