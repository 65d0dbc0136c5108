"""TextArena's TicTacToe, for self-play, with a bot that plays by chance."""

from agentrl.environments.tictactoe.env import TicTacToe, random_player

__all__ = ["TicTacToe", "random_player"]
