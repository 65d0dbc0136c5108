"""A loss of one's own, as a user writes it: `benchmarks.learning` counts its lines and runs it under Ray."""

import torch

import agentrl


@agentrl.loss
def sapo(batch: agentrl.LossBatch) -> torch.Tensor:
    tau = torch.where(batch.advantages > 0, 1.0, 1.05)
    return -torch.sigmoid(tau * (batch.ratio - 1)) * 4 / tau * batch.advantages


@agentrl.loss
def raises(batch: agentrl.LossBatch) -> torch.Tensor:
    raise ArithmeticError("as asked")


if __name__ == "__main__":
    agentrl.train("run.toml", loss=sapo)
