"""Programs that print the rewards of each format's own code. Each runs with the Python of the format's package."""
