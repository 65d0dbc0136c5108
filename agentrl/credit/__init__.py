"""From rewards to training samples: scorers, baselines, advantages."""
