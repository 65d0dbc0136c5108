"""The endpoint for agents from outside: model protocols on one side, the seats of an episode on the other."""
