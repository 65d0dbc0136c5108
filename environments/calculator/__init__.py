"""Arithmetic with a calculator for single operations: the environment of the main example."""

from agentrl.environments.calculator.env import Calculator

__all__ = ["Calculator"]
