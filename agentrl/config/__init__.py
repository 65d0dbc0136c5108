"""Configuration: the settings of a run, and their files."""
