"""Losses and advantage estimators from papers, for agentrl. Configurations name them like the built-in ones."""
