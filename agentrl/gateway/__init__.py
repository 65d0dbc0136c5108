"""The model endpoint for external agents: connects model protocols to the seats of an episode."""
