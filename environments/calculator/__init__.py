"""Arithmetic with a calculator that does one operation a call: the environment of the main example."""

from agentrl.environments.calculator.env import Calculator

__all__ = ["Calculator"]
