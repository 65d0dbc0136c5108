"""A proposer writes sums and solvers with a calculator attempt them: two policies that teach each other."""

from agentrl.environments.propose_and_solve.env import ProposeAndSolve, Solve

__all__ = ["ProposeAndSolve", "Solve"]
