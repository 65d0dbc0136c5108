"""A small suite of Harbor task directories, and worked examples of a tool call for a model that has never seen one.

The environment of 13_harbor.toml. Each task asks for one change of files that a shell command makes; its tests look for
the change.

python 13_harbor.py DIRECTORY      (writes the suite, a directory per task)
"""

from __future__ import annotations

import sys
from pathlib import Path

import agentrl
from agentrl_formats.harbor import Harbor

KINDS = {
    "make": ("Make the directory {word}.", "[ -d {word} ]"),
    "delete": ("Delete the file {word}.txt.", "[ ! -e {word}.txt ] && [ -e keep.txt ]"),
}
"""Instruction and check, by kind of task."""
WORDS = (
    *("apple", "river", "stone", "cloud", "tiger", "lemon", "paper", "music"),
    *("bread", "chair", "horse", "green", "table", "ocean", "sugar", "train"),
)
SHOWN = {
    "Make the directory boat.": "mkdir boat",
    "Delete the file hat.txt.": "rm hat.txt",
    "Delete the file candle.txt.": "rm candle.txt",
    "Make the directory wheel.": "mkdir wheel",
}
"""Worked examples: instruction and command."""


class Shown(Harbor):
    """Harbor tasks, after worked examples."""

    def prompt(self, task: agentrl.Task) -> list[agentrl.Message]:
        """Return the examples, then the instruction."""
        messages = []
        for instruction, command in SHOWN.items():
            call = agentrl.ToolCall(id="call0", name="bash", arguments={"command": command})
            messages += [
                agentrl.user(instruction),
                agentrl.Message(role="assistant", content="", tool_calls=(call,)),
                agentrl.Message(role="tool", content="ok", tool_call_id="call0"),
                agentrl.Message(role="assistant", content="Done."),
            ]
        return [*messages, agentrl.user(super().prompt(task))]


def write_suite(top: Path) -> int:
    """Write a task for each kind and word. Returns their number."""
    for kind, (instruction, check) in KINDS.items():
        for word in WORDS:
            files = {
                "task.toml": 'version = "1.0"\n[environment]\nmemory_mb = 64\n[verifier]\ntimeout_sec = 10.0\n',
                "instruction.md": instruction.format(word=word),
                "environment/Dockerfile": "FROM ubuntu:24.04\nWORKDIR /app\nCOPY files/ .\n",
                "environment/files/keep.txt": "keep me\n",
                f"environment/files/{word}.txt": "delete me\n",
                "tests/test.sh": f"#!/bin/sh\n{check.format(word=word)}\necho $((! $?)) > /logs/verifier/reward.txt\n",
            }
            for name, text in files.items():
                path = top / f"{kind}-{word}" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
    return len(KINDS) * len(WORDS)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("name the directory to write: python 13_harbor.py harbor_tasks")
    print(f"wrote {write_suite(Path(sys.argv[1]))} tasks into {sys.argv[1]}")
