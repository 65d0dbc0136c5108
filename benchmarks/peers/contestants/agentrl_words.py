"""The word problems for agentrl; the engine is chosen by the TOML file beside it."""

import json
from pathlib import Path

import words
from progress import SETTINGS, AgentrlObserver  # measured

import agentrl
from agentrl.config.load import load


class Words(agentrl.Environment):
    seats = ("solver",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        solver, data = ctx.agent("solver"), ctx.task.data
        turn = await solver.act(*(agentrl.Message(**message) for message in words.prompt(data["question"])))
        solver.reward(words.reward(turn.text, data["answer"]))

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        lines = Path(SETTINGS["tasks"]).read_text().splitlines()
        return [agentrl.Task(id=str(n), data=json.loads(line)) for n, line in enumerate(lines)]


if __name__ == "__main__":
    config = load(SETTINGS["config"], SETTINGS["overrides"])
    agentrl.train(
        config,
        environment=Words,
        resume=SETTINGS["resume"],
        observers=[AgentrlObserver()],  # measured
    )
