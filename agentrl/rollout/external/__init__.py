"""Episodes of agents outside the process, which call the gateway."""
