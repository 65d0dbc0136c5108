"""How tasks are written: environments, tools, agents, adapters, registry."""
