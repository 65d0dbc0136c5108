"""A run's other processes: worker pools, trainer ranks and engines on Ray nodes, journal streams and mirrors."""
