"""The commands of `agentrl`."""
