"""Processes beside the run's own: worker pools, trainer ranks and engines on Ray nodes, journal streams and mirrors."""
