"""A run's other processes: worker pools, trainer ranks and engines on Ray nodes, and journal streams."""
