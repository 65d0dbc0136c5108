"""Ray: the trainer pool."""
