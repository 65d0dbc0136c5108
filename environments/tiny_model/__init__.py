"""A recipe: build a tiny model for an environment from demonstrations, in minutes on two cores."""
