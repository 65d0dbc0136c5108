"""Requests that agents of others sent are answered, sampled as they ask, and trained as they were sampled.

`requests.json` has single requests of eight libraries, `sessions.json` whole programs with the policy's replies. No
library is needed; `tests/e2e/test_outside_agents.py` runs the programs themselves.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest

import agentrl
from agentrl.core.tokens import TrajectoryRow
from tests.unit.episodes import Played, play
from tests.unit.test_gateway import Loop
from tests.unit.test_gateway_sampling import rows, seen, trained, turns

if TYPE_CHECKING:
    import aiohttp

AGENTS = Path(__file__).parents[1] / "outside_agents"
REQUESTS: list[dict[str, Any]] = json.loads((AGENTS / "requests.json").read_text(encoding="utf-8"))
SESSIONS: dict[str, list[dict[str, Any]]] = json.loads((AGENTS / "sessions.json").read_text(encoding="utf-8"))
SAMPLING = ("temperature", "top_p", "top_k", "presence_penalty")
RECORDED = {f"{each['library']}-{n}": [{**each, "reply": "x"}] for n, each in enumerate(REQUESTS)} | SESSIONS


class Sends(Loop):
    """Sends recorded requests, one after the other."""

    recorded: ClassVar[list[dict[str, Any]]] = []
    answers: ClassVar[list[tuple[int, str]]] = []

    async def loop(self, client: aiohttp.ClientSession, endpoint: agentrl.Endpoint) -> Any:
        for each in self.recorded:
            async with client.post(endpoint.url + each["path"], json=each["body"]) as response:
                self.answers.append((response.status, await response.text()))


@functools.cache
def send(name: str) -> Played:
    """Play an episode of recorded requests; each reply of the policy is the recorded one."""
    recorded = RECORDED[name]
    environment = type("Sent", (Sends,), {"recorded": recorded, "answers": [], "__module__": __name__})
    replies = [each["reply"] for each in recorded for _ in range(each["body"].get("n", 1))]
    played = play(environment, replies, max_context=1 << 16)
    assert [status for status, _ in environment.answers] == [200] * len(recorded), environment.answers
    return played


def wrongly_trained(played: Played, change: Callable[[TrajectoryRow], TrajectoryRow] = lambda row: row) -> int:
    """Number of tokens that are trained at another temperature than the engine sampled them at.

    Args:
        played: the episode.
        change: what a fault does to a row.
    """
    sampled = np.array([sampling.temperature for sampling in played.sampling])
    wrong = 0
    parts = [part for row in rows(played) for part in row.trainable()]
    for row in map(change, parts):
        of_turn = row.turn_index[row.loss_mask]
        temperatures = np.ones(len(row)) if row.temperatures is None else row.temperatures
        wrong += int((np.abs(temperatures[row.loss_mask] - sampled[of_turn]) > 1e-6).sum())
    return wrong


def test_each_kind_of_request_is_among_them() -> None:
    bodies = [each["body"] for each in REQUESTS]
    assert {each["path"] for each in REQUESTS} == {"/chat/completions", "/responses", "/messages"}
    assert len({each["library"] for each in REQUESTS}) >= 8
    for name in ("temperature", "top_p", "top_k", "presence_penalty", "seed", "tool_choice", "response_format", "text"):
        assert any(name in body for body in bodies), name


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_requests_are_answered_sampled_as_they_ask_and_trained(name: str) -> None:
    recorded, played = RECORDED[name], send(name)
    assert played.header.drop_reason is None
    assert len(played.sampling) == len(turns(played))
    bodies = [each["body"] for each in recorded for _ in range(each["body"].get("n", 1))]
    asked = [{field: float(body[field]) for field in SAMPLING if field in body} for body in bodies]
    sampled = [
        {field: getattr(each, field) for field in fields} for each, fields in zip(played.sampling, asked, strict=True)
    ]
    assert sampled == asked
    for call, body in enumerate(bodies):
        if any(field in body for field in ("response_format", "text", "output_config")):
            prompt = seen(played, call)
            assert "Reply with JSON that fits" in prompt or "Reply with a JSON object" in prompt
    # The scripted engine keeps no sets, so filtered tokens are not trained.
    assert trained(played) == [
        each.get("temperature") != 0
        and each.get("presence_penalty", 0) == 0
        and each.get("top_p", 1) == 1
        and "top_k" not in each
        for each in asked
    ]


@pytest.mark.parametrize("name", RECORDED)
def test_no_token_is_trained_at_another_temperature_than_its_own(name: str) -> None:
    assert wrongly_trained(send(name)) == 0


def test_tokens_that_are_trained_at_the_runs_temperature_are_found() -> None:
    played = send("openai_loop")
    assert wrongly_trained(played, lambda row: row.with_column("temperatures", None)) > 0
