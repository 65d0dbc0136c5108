"""Requests that agent libraries sent, recorded from programs written as their documentation writes them: each is
answered, sampled as it asks, and trained. No library is needed; `tests/e2e/test_outside_agents.py` runs them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

import agentrl
from tests.unit.episodes import play
from tests.unit.test_gateway import Loop
from tests.unit.test_gateway_sampling import seen, trained, turns

if TYPE_CHECKING:
    import aiohttp

RECORDED = json.loads((Path(__file__).parents[1] / "outside_agents/requests.json").read_text(encoding="utf-8"))


class Sends(Loop):
    """Sends a recorded request."""

    recorded: ClassVar[dict[str, Any]] = {}
    answers: ClassVar[list[tuple[int, str]]] = []

    async def loop(self, client: aiohttp.ClientSession, endpoint: agentrl.Endpoint) -> Any:
        async with client.post(endpoint.url + self.recorded["path"], json=self.recorded["body"]) as response:
            self.answers.append((response.status, await response.text()))


def test_each_kind_of_request_is_among_them() -> None:
    bodies = [each["body"] for each in RECORDED]
    assert {each["path"] for each in RECORDED} == {"/chat/completions", "/responses", "/messages"}
    assert len({each["library"] for each in RECORDED}) >= 8
    for name in ("temperature", "top_p", "top_k", "presence_penalty", "seed", "tool_choice", "response_format", "text"):
        assert any(name in body for body in bodies), name


@pytest.mark.parametrize(
    "recorded", [pytest.param(each, id=f"{each['library']}-{n}") for n, each in enumerate(RECORDED)]
)
def test_a_recorded_request_is_answered_sampled_as_it_asks_and_trained(recorded: dict[str, Any]) -> None:
    body = recorded["body"]
    replies = body.get("n", 1)
    environment = type("Sent", (Sends,), {"recorded": recorded, "answers": [], "__module__": __name__})
    played = play(environment, ["x"] * replies, max_context=1 << 15)
    assert environment.answers[0][0] == 200, environment.answers
    expected = {
        name: float(body[name]) for name in ("temperature", "top_p", "top_k", "presence_penalty") if name in body
    }
    for sampling in played.sampling:
        assert {name: getattr(sampling, name) for name in expected} == expected
    if any(name in body for name in ("response_format", "text", "output_config")):
        assert "Reply with JSON that fits" in seen(played) or "Reply with a JSON object" in seen(played)
    is_greedy = expected.get("temperature") == 0
    is_penalized = expected.get("presence_penalty", 0) != 0
    is_filtered = expected.get("top_p", 1) < 1 or "top_k" in expected  # the scripted engine keeps no sets
    assert trained(played) == [not (is_greedy or is_penalized or is_filtered)] * replies
    assert len(turns(played)) == replies
