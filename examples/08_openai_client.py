"""An agent written for the openai client learns to use a calculator, without changes to its loop.

pip install -c constraints.txt '.[train,calculator,openai]'      (in agentrl's directory)
python 08_openai_client.py        (about two minutes on two CPU cores; needs no other file)

`Solver.play` is the loop. The class around it, the client's address and key, and the reward make it an environment.
The model in training samples every request as a turn, and is trained on its own tokens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

import agentrl
from agentrl.environment.environment import Split
from agentrl.environments.calculator.tasks import held_out_tasks, training_tasks

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "One operation on two integers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer"},
                "op": {"enum": ["+", "-", "*"], "type": "string"},
                "b": {"type": "integer"},
            },
            "required": ["a", "op", "b"],
        },
    },
}
CONFIG = agentrl.RunConfig(
    name="openai_client",
    steps=40,
    environment={"id": f"{Path(__file__).resolve()}:Solver"},
    model={"path": "agentrl.environments:calculator/model"},
    policies={"solver": {"learning_rate": 3e-4, "step_size": 64, "max_staleness": 1}},
    credit={"group_size": 8},
    sampling={"max_tokens": 32, "max_turns": 6},
    engine={"slots": 64, "max_context": 192},
    trainer={"loss": {"normalizer": 64}},
    evaluation={"tasks": 256},
)
CLIENT = AsyncOpenAI(api_key="of each episode", max_retries=0)


def calculate(a: int, op: str, b: int) -> str:
    """The tool."""
    if op == "+":
        return str(a + b)
    return str(a - b if op == "-" else a * b)


class Solver(agentrl.HarnessEnvironment):
    """Sums and differences of a few terms, solved by a loop over chat completions."""

    seats = ("solver",)

    async def play(self, task: agentrl.Task, endpoint: agentrl.Endpoint) -> str:
        """Run the agent: send a request, call the tool, send its result; the first text is the answer."""
        client = CLIENT.with_options(base_url=endpoint.url, api_key=endpoint.key)
        messages: list[Any] = [{"role": "user", "content": task.data["question"]}]
        while True:
            reply = await client.chat.completions.create(model="solver", messages=messages, tools=[TOOL])
            message = reply.choices[0].message
            if reply.choices[0].finish_reason == "length":
                return ""  # max_tokens cut the reply: it is neither an answer nor a call
            if not message.tool_calls:
                return message.content or ""
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls:
                try:
                    result = calculate(**json.loads(call.function.arguments))
                except (TypeError, ValueError) as error:
                    result = f"error: {error}"
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

    def reward(self, task: agentrl.Task, episode: agentrl.HarnessEpisode) -> float:
        """Return 1 for exactly the right number, else 0; also if the loop runs out of turns."""
        return float(str(episode.result or "").strip() == task.data["answer"])

    @classmethod
    def tasks(cls, split: Split, *, seed: int = 0) -> agentrl.TaskSource:
        """The calculator's questions."""
        return held_out_tasks(256) if split == "held_out" else training_tasks(seed, held_out=512)


def main() -> None:
    """Train, and print how the accuracy improved."""
    run = agentrl.train(CONFIG, resume="--resume" in sys.argv)
    if run.interrupted:
        raise SystemExit("stopped before its last step; --resume continues the run")
    start, end = run.summary["reward_start"], run.summary["reward_end"]
    print(f"accuracy on 256 held-out questions: {start:.2f} before, {end:.2f} after")


if __name__ == "__main__":
    try:
        main()
    except (agentrl.AgentRLError, KeyboardInterrupt) as error:
        raise SystemExit(str(error) or "interrupted") from None
