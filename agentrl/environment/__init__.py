"""Writing environments: tasks, tools, agents, adapters for games, and the registry."""
