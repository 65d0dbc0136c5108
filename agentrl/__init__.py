"""RL of language-model agents whose unit is the episode."""
