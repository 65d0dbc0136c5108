"""Rows of TRL's data sets, and classes for its `environment_factory`; TRL 1.16 is the original."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal
from unittest import mock

from agentrl.environment.registry import TrlEnvironment, resolve
from tests.translations.rows import Row, seen
from tests.unit.episodes import play


class Game:
    """A class that reports what it was given."""

    def __init__(self) -> None:
        self.row: dict[str, Any] = {}
        self.moves: list[Any] = []

    def reset(self, **row: Any) -> Any:
        self.row = row
        return row.get("observation")

    def get_reward(self) -> float:
        REACHED.append([self.row.get("answer"), *self.moves])
        return 1.0


REACHED: list[Any] = []
"""What reached the grader of the newest episode."""


class Words(Game):
    """As the classes in TRL's examples: texts of arguments in Google style."""

    hint: str = "not a tool"

    def guess(self, word: str, sure: bool = False) -> str:
        """Guess a word, in
        one try.

        The word has five letters.

        Args:
            word: The guess, formatted as
                '[abcde]'.
            sure: Whether it is final.

        Returns:
            The feedback.
        """
        self.moves.append([word, sure])
        return f"{word}: XXYGX"

    def move(self, direction: Literal["up", "down"], steps: int | None = None) -> dict[str, int]:
        """Move.

        Args:
            direction: One of up, down.
            steps: How many.
        """
        self.moves.append([direction, steps])
        return {"score": 4}

    async def look(self) -> str:
        """Look around."""
        return "a wall"

    @property
    def size(self) -> int:
        """Not a tool, and not to be evaluated while tools are listed."""
        raise AssertionError

    @staticmethod
    def helper(value: str) -> str:
        """TRL 1.0 offers no static methods."""
        return value

    @classmethod
    def make(cls) -> Words:
        """TRL 1.16 offers no class methods."""
        return cls()

    def _private(self) -> None: ...


class Inherits(Words):
    """Inherited methods are tools, too."""


class Unjudged:
    def reset(self, **row: Any) -> None: ...


class NoReset:
    def get_reward(self) -> float:
        return 0.0


class Named(Game):
    """As in `multi_env.py`: `reset` names the columns that it wants."""

    def reset(self, answer: int, observation: str = "none") -> str:  # type: ignore[override]
        self.row = {"answer": answer}
        return observation


class Later(Game):
    async def reset(self, **row: Any) -> Any:
        return super().reset(**row)

    async def get_reward(self) -> float:  # type: ignore[override]
        return super().get_reward()


def translate(input: dict[str, Any]) -> tuple[Any, Any]:
    environment = resolve(input.get("class", Game))
    REACHED.clear()
    if input.get("tools"):
        assert issubclass(environment, TrlEnvironment)
        return {
            name: [tool.spec.description, described(tool.spec.parameters)]
            for name, tool in environment.tool_table().items()
        }, None
    replies = [*(f"<tool_call>{call}</tool_call>" for call in input.get("calls", [])), "done"]
    return seen(play(environment, replies, data=input["row"])), REACHED[0]


def described(parameters: Any) -> dict[str, str]:
    """Return the texts of a tool's parameters."""
    return {name: schema.get("description", "") for name, schema in parameters["properties"].items()}


def original(input: dict[str, Any]) -> tuple[Any, Any]:
    """Return the tools as transformers writes their schemas for TRL."""
    from transformers.utils import get_json_schema

    schemas = [get_json_schema(getattr(input["class"](), name))["function"] for name in ("guess", "look", "move")]
    return {schema["name"]: [schema["description"], described(schema["parameters"])] for schema in schemas}, None


@contextlib.contextmanager
def planted() -> Iterator[None]:
    """Lose all messages but the last."""
    read = TrlEnvironment._messages
    with mock.patch.object(TrlEnvironment, "_messages", lambda self, *arguments: read(self, *arguments)[-1:]):
        yield


SYSTEM = {"role": "system", "content": "Answer in French."}
USER = {"role": "user", "content": "Count."}
PARTS = [{"type": "text", "text": "Count."}]
IMAGE = [{"type": "image", "image": "data:image/png;base64,AA"}, *PARTS]
CALL = {"type": "function", "function": {"name": "guess", "arguments": {"word": "crane"}}}
FIRST, SECOND = ["system", "Answer in French."], ["user", "Count."]
GIVEN = [None]
"""What reaches the grader of a row without an answer."""


def row(name: str, prompt: Any, sees: Any = None, refused: str = "", **more: Any) -> Row:
    columns = {**({} if prompt is ... else {"prompt": prompt}), **more}
    return Row(
        name=name,
        input={"row": columns},
        sees=sees,
        grader=None if refused else [more.get("answer")],
        refused=refused,
    )


def called(name: str, call: str, answer: str, grader: Any, **more: Any) -> Row:
    input = {"class": Words, "row": {"prompt": [USER]}, "calls": [call]}
    return Row(name=name, input=input, sees=[SECOND, ["tool", answer]], grader=[None, *grader], **more)


ROWS = [
    row("text", "Count.", [SECOND]),
    row("one message", [USER], [SECOND]),
    row("system message", [SYSTEM, USER], [FIRST, SECOND]),
    row(
        "system message and observation", [SYSTEM, USER], [FIRST, ["user", "Count. Reach 5."]], observation=" Reach 5."
    ),
    row(
        "worked example",
        [{"role": "user", "content": "1"}, {"role": "assistant", "content": "one"}, USER],
        [["user", "1"], ["assistant", "one"], SECOND],
    ),
    row(
        "worked example with a call",
        [
            {"role": "user", "content": "1"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "name": "guess", "content": "XXYGX"},
            {"role": "assistant", "content": "Wrong."},
            USER,
        ],
        [["user", "1"], ["assistant", ""], ["tool", "XXYGX"], ["assistant", "Wrong."], SECOND],
    ),
    row("columns of other rows", [{**USER, "tool_calls": None, "name": None}], [SECOND]),
    row("parts", [{"role": "user", "content": PARTS}], [SECOND]),
    row("parts and observation", [{"role": "user", "content": PARTS}], [["user", "Count.\nGo."]], observation="Go."),
    row("observation in parts", [USER], [["user", "Count.\nGo."]], observation=[{"type": "text", "text": "Go."}]),
    row("observation after text", "Count.", [["user", "Count. Go."]], observation=" Go."),
    row("no prompt", ..., [["user", "Go."]], observation="Go."),
    row("no prompt and no observation", ..., [["user", ""]]),
    row("empty observation", [USER], [SECOND], observation=""),
    row("answer", [USER], [SECOND], answer="5"),
    row("answer of another type", [USER], [SECOND], answer={"low": 1, "high": [2, 3.5, None, True]}),
    row("null prompt", None, refused="prompt: messages must be a list of objects, not None"),
    row("number as prompt", 5, refused="prompt: messages must be a list of objects, not 5"),
    row("empty prompt", [], refused="prompt: messages: there must be at least one"),
    row("texts as prompt", ["Count."], refused="prompt: messages must be a list of objects"),
    row("no role", [{"content": "Count."}], refused="messages[0].role is None"),
    row("other role", [{"role": "judge", "content": "Count."}], refused="messages[0].role is 'judge'"),
    row("image", [{"role": "user", "content": IMAGE}], refused="messages[0].content has a part of type 'image'"),
    row("column of images", [USER], refused="images: models here read text only", images=["a.png"]),
    row("column of one image", [USER], refused="image: models here read text only", image="a.png"),
    row("column without images", [USER], [SECOND], images=None),
    row("number as content", [{"role": "user", "content": 5}], refused="messages[0].content must be a list of objects"),
    row("prefilled answer", [USER, {"role": "assistant", "content": "One,"}], refused="cannot be continued"),
    row("column that is lost", [{**USER, "weight": 0}], refused="messages[0].weight is not supported"),
    row("audio", [{**USER, "audio": "a.wav"}], refused="messages[0] has audio"),
    row(
        "reasoning that is lost",
        [USER, {"role": "assistant", "content": "one", "thinking": "hm"}, USER],
        refused="messages[1].thinking is not supported",
    ),
    row(
        "observation is a dict",
        [USER],
        refused="reset() returned {'board': 1}; return a string",
        observation={"board": 1},
    ),
    row("observation is a number", [USER], refused="reset() returned 5; return a string", observation=5),
    row("observation is an image", [USER], refused="a part of type 'image'", observation=IMAGE),
    Row(
        name="columns that reset names",
        input={"class": Named, "row": {"prompt": [USER], "answer": 7, "other": "x", "observation": " Go."}},
        sees=[["user", "Count. Go."]],
        grader=[7],
    ),
    Row(
        name="asynchronous methods",
        input={"class": Later, "row": {"prompt": [USER], "answer": 7, "observation": " Go."}},
        sees=[["user", "Count. Go."]],
        grader=[7],
    ),
    called("a call", '{"name": "guess", "arguments": {"word": "[crane]"}}', "[crane]: XXYGX", [["[crane]", False]]),
    called("all arguments", '{"name": "guess", "arguments": {"word": "a", "sure": true}}', "a: XXYGX", [["a", True]]),
    called("a choice", '{"name": "move", "arguments": {"direction": "up", "steps": 2}}', '{"score":4}', [["up", 2]]),
    called("an asynchronous tool", '{"name": "look", "arguments": {}}', "a wall", []),
    *(
        Row(
            name=f"tools of {kind.__name__}",
            input={"class": kind, "tools": True},
            sees={
                "guess": [
                    "Guess a word, in\none try.\n\nThe word has five letters.",
                    {"word": "The guess, formatted as '[abcde]'.", "sure": "Whether it is final."},
                ],
                "look": ["Look around.", {}],
                "move": ["Move.", {"direction": "One of up, down.", "steps": "How many."}],
            },
            compared=True,
        )
        for kind in (Words, Inherits)
    ),
    Row(name="no get_reward", input={"class": Unjudged}, refused="TRL's `reward_funcs` are not used here"),
    Row(name="no reset", input={"class": NoReset}, refused="has no TRL-style reset()"),
]
