"""Credit assignment: turns rewards into training samples by scorers, baselines and advantages."""
