"""A task with three tools and files: read two of four files, and write the sum of two numbers into a third.

As in examples/16_qwen.py, a worked example shows the calls as text, in the form that Qwen2.5-Coder-0.5B writes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import agentrl

STOCK = {
    "fruit.txt": ("pears", "plums", "figs", "apples"),
    "tools.txt": ("hammers", "saws", "drills", "pliers"),
    "drinks.txt": ("teas", "juices", "sodas", "waters"),
    "toys.txt": ("dolls", "kites", "balls", "drums"),
    "books.txt": ("novels", "atlases", "poems", "diaries"),
    "clothes.txt": ("shirts", "socks", "hats", "coats"),
}
"""Things by file."""
ANSWER = "answer.txt"
SHOWN = (
    agentrl.system(f"Look up both numbers in the files, write their sum into {ANSWER}, then say done."),
    agentrl.user("How many forks and lamps are there together?"),
    agentrl.assistant('{"name": "list_files", "arguments": {}}'),
    agentrl.Message(role="tool", content='["kitchen.txt","lights.txt","paper.txt"]', name="list_files"),
    agentrl.assistant('{"name": "read_file", "arguments": {"name": "kitchen.txt"}}'),
    agentrl.Message(role="tool", content="spoons: 31\nforks: 24", name="read_file"),
    agentrl.assistant('{"name": "read_file", "arguments": {"name": "lights.txt"}}'),
    agentrl.Message(role="tool", content="lamps: 12\ncandles: 45", name="read_file"),
    agentrl.assistant(f'{{"name": "write_file", "arguments": {{"name": "{ANSWER}", "content": "36"}}}}'),
    agentrl.Message(role="tool", content=f"wrote {ANSWER}", name="write_file"),
    agentrl.assistant("Done."),
)
"""The start of every prompt: a worked example."""


class Files(agentrl.ToolEnvironment):
    """A quarter of the reward for reading each of the two files, half for writing the right sum."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        """Give the episode its own files."""
        self.contents: dict[str, str] = dict(ctx.task.data["contents"])
        self.was_read: set[str] = set()
        await super().run(ctx)

    @agentrl.tool
    def list_files(self) -> list[str]:
        """The names of all files."""
        return sorted(self.contents)

    @agentrl.tool
    def read_file(self, name: str) -> str:
        """The content of a file."""
        if name not in self.contents:
            raise ValueError(f"there is no file {name}; list_files names all")
        self.was_read.add(name)
        return self.contents[name]

    @agentrl.tool
    def write_file(self, name: str, content: str) -> str:
        """Write a file."""
        self.contents[name] = content
        return f"wrote {name}"

    def prompt(self, task: agentrl.Task) -> list[agentrl.Message]:
        """Show the worked example, then ask."""
        return [*SHOWN, agentrl.user(task.data["question"])]

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        """A quarter for each file that holds a number, half for their sum."""
        is_right = self.contents.get(ANSWER, "").strip() == task.data["answer"]
        return 0.25 * len(self.was_read & set(task.data["places"])) + 0.5 * is_right

    @classmethod
    def demonstrate(cls, task: agentrl.Task, random: random.Random) -> Iterator[object]:
        """Yield the right calls, for `agentrl env check`."""
        yield {"name": "list_files", "arguments": {}}
        for place in task.data["places"]:
            yield {"name": "read_file", "arguments": {"name": place}}
        yield {"name": "write_file", "arguments": {"name": ANSWER, "content": task.data["answer"]}}
        yield "Done."

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        """Return 1,024 tasks per split. Numbers are even in training tasks, odd in held-out ones."""
        return [_task(split, seed, index) for index in range(1024)]


def _task(split: str, seed: int, index: int) -> agentrl.Task:
    drawn = random.Random(f"{split} {seed if split == 'train' else 0} {index}")
    stock: dict[str, dict[str, int]] = {}
    for place in drawn.sample(sorted(STOCK), 4):
        things = drawn.sample(STOCK[place], 3)
        stock[place] = {thing: 2 * drawn.randint(5, 24) + (split == "held_out") for thing in things}
    places = drawn.sample(sorted(stock), 2)
    first, second = (drawn.choice(sorted(stock[place])) for place in places)
    data = {
        "question": f"How many {first} and {second} are there together?",
        "contents": {
            place: "\n".join(f"{thing}: {number}" for thing, number in things.items())
            for place, things in stock.items()
        },
        "places": places,
        "answer": str(stock[places[0]][first] + stock[places[1]][second]),
    }
    return agentrl.Task(id=f"{split}-{index}", data=data)
