"""A match in which every kind of policy has a seat, and what its journal says of who played with which weights."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web

import agentrl
from agentrl.app.policies import weights_from_directory
from agentrl.core.tokens import TrajectoryRow
from agentrl.inspection.reader import RunReader
from agentrl.journal.entries import TurnEntry
from agentrl.journal.reader import AttemptLocation, TurnLogReader
from agentrl.journal.rows import assemble_trajectories
from tests.learn_cases import divisors


class Match(agentrl.Environment):
    """Two sides, a third seat that is rewarded with them, a judge that is not."""

    seats = ("x", "o", "helpmate", "judge")

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        for seat in self.seats:
            turn = await ctx.agent(seat).act(agentrl.user("1 + 2 ="), max_tokens=6)
            if seat not in ("judge", "critic"):
                ctx.agent(seat).reward(sum(map(str.isdigit, turn.text)) / 6)

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        return [agentrl.Task(id=f"{n}", data={}) for n in range(4)]


class WatchedMatch(Match):
    """With somebody from elsewhere."""

    seats = (*Match.seats, "critic")


def config_of(base: Path, judge: Path, directory: Path, **more: Any) -> agentrl.RunConfig:
    """Two adapters learn, one is frozen, past versions play; `policies` in `more` are played with besides."""
    lora = {"rank": 2, "target_modules": ["q_proj", "v_proj"]}
    learning = {"lora": lora, "step_size": 4, "learning_rate": 1e-2}
    policies = {
        "player": learning,
        "other": learning,
        "past": {"kind": "past", "of": "player", "every": 1, "size": 2},
        "judge": {"kind": "frozen", "path": str(judge), "sampling": {"temperature": 0.7}},
        **more.pop("policies", {}),
    }
    values = {
        "name": "match",
        "directory": str(directory),
        "steps": 4,
        "environment": {"id": "match"},
        "model": {"path": str(base)},
        "policies": policies,
        "seats": {"x": ["player", "past"], "o": ["past", "player"], "helpmate": "other", "judge": "judge"},
        "credit": {"group_size": 2},
        "engine": {"max_context": 64, "slots": 8},
        "evaluation": {"tasks": 0},
        "checkpoint": {"every": 1, "versions": 0},
    }
    return agentrl.RunConfig.model_validate(values | more)


def write_judge(base: Path, directory: Path) -> Path:
    """An adapter that changes every logit."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    lora = LoraConfig(r=3, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora).save_pretrained(directory)
    return directory


@contextmanager
def answering(text: str) -> Iterator[str]:
    """The address of a chat endpoint on loopback that says one thing, as long as the context lasts."""
    loop, started = asyncio.new_event_loop(), threading.Event()
    addresses: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked = (await request.json())["messages"]
        assert [message["role"] for message in asked] == ["user"]
        return web.json_response({"choices": [{"message": {"content": text}, "finish_reason": "stop"}]})

    async def serve() -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", answer)
        runner = web.AppRunner(app, shutdown_timeout=0.5)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        addresses.append(f"http://127.0.0.1:{runner.addresses[0][1]}/v1")
        stopped = loop.create_future()
        loop.call_soon(started.set)
        ends.append(lambda: loop.call_soon_threadsafe(stopped.set_result, None))
        await stopped
        await runner.cleanup()

    ends: list[Any] = []
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    started.wait()
    try:
        yield addresses[0]
    finally:
        ends[0]()
        thread.join()
        loop.close()


def played(run: Path) -> list[tuple[TurnEntry, TrajectoryRow]]:
    """Every turn of training with its row."""
    reader, log = RunReader(run), TurnLogReader(run / "journal")
    found = []
    for line in reader.episodes():
        entries = reader.episode(line.episode).entries
        turns = {entry.seat: entry for _, entry in entries if isinstance(entry, TurnEntry)}
        partition = next((run / "journal").glob("turns-*.db")).name
        rows = assemble_trajectories(log.read_many([AttemptLocation(partition, line.episode, 0, len(entries))])[0])
        found += [(turns[t.seat], t.rows[0]) for t in rows if t.rows]
    reader.close()
    log.close()
    return found


def logprobs_under(directory: Path, row: TrajectoryRow) -> np.ndarray[Any, Any]:
    """Of a row's sampled tokens, with an adapter loaded as anybody would."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory)
    with torch.inference_mode():
        logits = model(torch.tensor(row.token_ids[None], dtype=torch.long)).logits[0, :-1] / divisors(row)
    told = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(row.token_ids[1:, None], dtype=torch.long))
    return np.asarray(told[:, 0])[row.loss_mask[1:]]


def check_played(turns: list[tuple[TurnEntry, TrajectoryRow]], run: Path, judge: Path) -> set[tuple[int, int]]:
    """Each seat was played by the weights it says; the past versions that were met."""
    past = [turn.tokens.spans[0].version for turn, _ in turns if turn.policy == "past"]
    opponents = {(version.lineage, version.step) for version in past}
    assert {version.policy for version in past} == {"player"}
    assert len(opponents) > 2
    assert {turn.seat for turn, _ in turns if turn.policy == "past"} == {"x", "o"}
    assert all((turn.temperature == 0.7) == (turn.policy == "judge") for turn, _ in turns)
    judged = [row for turn, row in turns if turn.policy == "judge"]
    versions = {(span.version.lineage, span.version.step) for row in judged for span in row.spans}
    assert versions == {weights_from_directory("judge", judge).version[1:]}
    here = [(turn, row) for turn, row in turns if turn.policy != "critic"]
    last = {(turn.policy, turn.tokens.spans[0]): (turn, row) for turn, row in here if len(turn.tokens.spans) == 1}
    assert {turn.policy for turn, _ in last.values()} == {"player", "other", "past", "judge"}
    for turn, row in last.values():
        version = turn.tokens.spans[0].version
        named = run / "versions" / version.policy / f"{version.lineage}.{version.step}"
        told = row.logprobs[row.loss_mask]
        own = logprobs_under(judge if turn.policy == "judge" else named, row)
        assert told == pytest.approx(own, abs=2e-3), f"{turn.policy} {turn.tokens.spans}"
    return opponents


def check_critic(turns: list[tuple[TurnEntry, TrajectoryRow]], text: str) -> None:
    """Whoever is elsewhere said one thing, as JSON, with no logprob of ours."""
    said = [(turn, row) for turn, row in turns if turn.policy == "critic"]
    assert said
    assert {json.loads(turn.text)["content"] for turn, _ in said} == {text}
    assert not any(np.any(row.logprobs) for _, row in said)
