"""Ray: the trainer pool, and engines on other nodes."""
