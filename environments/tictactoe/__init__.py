"""TextArena's TicTacToe, for self-play, with a bot that plays random moves."""

from agentrl.environments.tictactoe.env import TicTacToe, random_player

__all__ = ["TicTacToe", "random_player"]
