"""Configuration: what a run is, and how it is read."""
