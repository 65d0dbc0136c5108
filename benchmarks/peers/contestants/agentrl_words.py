"""The word problems for agentrl."""

import words
from agentrl_training import read_tasks, train

import agentrl


class Words(agentrl.Environment):
    seats = ("solver",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        solver, data = ctx.agent("solver"), ctx.task.data
        turn = await solver.act(*(agentrl.Message(**message) for message in words.prompt(data["question"])))
        solver.reward(words.reward(turn.text, data["answer"]))

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        return read_tasks()


if __name__ == "__main__":
    train(Words)
