"""Two steps of training an agent of others, killed and resumed.

    python -m tests.outside_agents.runs LIBRARY DIRECTORY [resume]

is one life of such a run. The engine is scripted: it calls the tool, now and then one that does not exist, and answers,
now and then wrongly. Each reply holds a random text, so that a reply that was sampled again differs.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from agentrl.app.run_parts import RunFactories
from agentrl.app.training import run_training
from agentrl.config.plans import EnginePlan, TrainerPlan
from agentrl.config.run import RunConfig
from agentrl.core.ports import Engine, GenerateRequest, Trainer
from agentrl.core.records import PolicyVersion
from agentrl.engines.scripted import ScriptedEngine
from agentrl.journal.entries import JournalEntry, TurnEntry
from agentrl.rollout.chat.byte_formats import STOP_TOKEN, PlainChatFormat
from tests.journal_oracle import judge
from tests.outside_agents.environments import AGENTS
from tests.support.recording_trainer import RecordingTrainer

STEPS = 2
ENDED_S = 600.0
"""Seconds after which a life hangs."""


def call(tool: str, **arguments: Any) -> str:
    """A call as the policy writes it."""
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


UNKNOWN = call("subtract", a=1, b=2)


def good_reply(context: str) -> str:
    """The reply of a good policy: a call of the tool, then the answer."""
    tools = context.partition("<|stop|>")[0] if context.startswith("<|start|>tools") else ""
    question = re.search(r"What is (\d+) \+ (\d+)\?", context)
    assert question is not None
    a, b = map(int, question.groups())
    if "code>" in context and not tools:  # it runs the Python that the policy writes
        return f"I add them.\n<code>\nfinal_answer(add({a}, {b}))\n</code>"
    if str(a + b) in context:
        if "final_answer(" in tools:
            return call("final_answer", answer=str(a + b))
        if "final_result(" in tools:
            return call("final_result", total=a + b, explanation=f"{a} + {b} = {a + b}")
        return json.dumps({"sum": a + b}) if "in JSON" in context else f"The sum is {a + b}"
    tool = re.search(r"^(\w*add)(?:\(|$)", context, re.MULTILINE)  # Claude Code names some tools in a message only
    return call(tool[1], a=a, b=b) if tool else "I cannot tell"


def _script(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
    reply = good_reply(PlainChatFormat().decode(request.token_ids.tolist()))
    draw = secrets.randbelow(5)
    if reply.startswith("<tool_call>") and "final_answer" not in reply and draw == 0:
        reply = UNKNOWN
    elif draw == 1:
        reply = reply.replace("7", "8")
    mark = secrets.token_hex(4)
    reply = f'{{"mark": "{mark}", {reply[1:]}' if reply.startswith("{") else f"[{mark}] {reply}"
    return [*reply.encode(), STOP_TOKEN]


def live(library: str, directory: Path, *, resume: bool) -> None:
    """One life of the run in `directory`/run."""

    async def engine(plan: EnginePlan, versions: Mapping[str, PolicyVersion], *rest: object) -> Engine:
        return ScriptedEngine(_script, versions=versions, seconds_per_token=0.005, max_context=1 << 20)

    def trainer(plan: TrainerPlan, path: Path, *rest: object) -> Trainer:
        return RecordingTrainer(list(plan.policies), versions=path / "versions")

    config = RunConfig.model_validate(
        {
            "name": "run",
            "directory": str(directory),
            "steps": STEPS,
            "max_in_flight": 2,
            "environment": {"id": "unused"},
            "model": {"path": "unused"},
            "policies": {"main": {"step_size": 2, "max_staleness": 1}},
            "credit": {"group_size": 2},
            "sampling": {"max_tokens": 512, "max_turns": 20},
            "engine": {"max_context": 1 << 20},
            "checkpoint": {"every": 1},
            "evaluation": {"tasks": 0},
        }
    )
    factories = RunFactories(engine=engine, trainer=trainer, chat_format=lambda model: PlainChatFormat())
    asyncio.run(run_training(config, AGENTS[library], factories=factories, resume=resume))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a run that was killed while agents waited for replies, and resumed."""

    steps: int
    recalled: int
    """Replies of before the kill that programs which began again got."""
    resampled_tokens: int
    """Tokens of such replies that were sampled again, or not asked for."""
    dropped: list[str]
    violations: list[str]
    """What the second reader of journals says against it."""
    rewards: list[float]


def train_killed(library: str, directory: Path) -> Outcome:
    """Train two steps; kill the run with SIGKILL once an episode is in flight and has a reply, and resume it."""
    run = directory / "run"
    first = _start(library, directory)
    try:
        deadline = time.monotonic() + ENDED_S
        while not (_ended(run) and _in_flight(run)):
            if first.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"it ended before it could be killed:\n{_said(directory)}")
            time.sleep(0.05)
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    before = {key: reply for key, reply in _replies(run).items() if key[0] in _in_flight(run)}
    second = _start(library, directory, "resume")
    try:
        status = second.wait(timeout=ENDED_S)
    finally:
        second.kill()
        second.wait()
    assert status == 0, _said(directory)
    after = _replies(run)
    newest = {episode: attempt for episode, _, attempt in sorted(after, key=lambda key: key[2])}
    asked_again = {key: after.get((*key[:2], newest[key[0]])) for key in before if newest[key[0]] > key[2]}
    lost = {key for key, reply in asked_again.items() if reply != before[key]}
    rows = _rows(run, "SELECT reward, drop_reason, detail FROM episodes")
    return Outcome(
        steps=max(step for (step,) in _rows(run, "SELECT step FROM steps")),
        recalled=len(asked_again) - len(lost),
        resampled_tokens=sum(len(before[key]) // 4 for key in lost),
        dropped=[f"{reason}: {detail}" for _, reason, detail in rows if reason not in (None, "run_ended")],
        violations=judge(run, ended=True),
        rewards=[reward for reward, _, _ in rows if reward is not None],
    )


def _start(library: str, directory: Path, *more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.outside_agents.runs", library, str(directory), *more]
    with (directory / "said.txt").open("ab") as said:
        return subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=said, stderr=said)


def _said(directory: Path) -> str:
    return (directory / "said.txt").read_text(errors="replace")[-4000:]


def _rows(run: Path, query: str, file: str = "control.db") -> list[tuple[Any, ...]]:
    path = run / "journal" / file
    if not path.exists():
        return []
    connection = sqlite3.connect(path)
    try:
        return connection.execute(query).fetchall()
    except sqlite3.OperationalError:  # not written yet
        return []
    finally:
        connection.close()


def _ended(run: Path) -> set[str]:
    return {episode for (episode,) in _rows(run, "SELECT episode FROM episodes")}


def _in_flight(run: Path) -> set[str]:
    """Episodes that have a reply and have not ended."""
    return {episode for episode, _, _ in _replies(run)} - _ended(run)


def _replies(run: Path) -> dict[tuple[str, str, int], bytes]:
    """Tokens of the recorded replies, by episode, call and attempt."""
    found = {}
    for path in (run / "journal").glob("turns-*.db"):
        for row in _rows(run, "SELECT episode, attempt, call, asked, body FROM entries", path.name):
            named = dict(zip(("episode_id", "attempt", "call_id", "request_hash", "body"), row, strict=True))
            entry = msgspec.convert(named, JournalEntry)
            if isinstance(body := entry.decode(), TurnEntry):
                found[entry.episode_id, entry.call_id, entry.attempt] = body.tokens.token_ids
    return found


if __name__ == "__main__":
    live(sys.argv[1], Path(sys.argv[2]), resume=sys.argv[3:] == ["resume"])
