"""The model class of mini-swe-agent for 09_harness.py: its OpenRouter class, pointed at the episode's endpoint.

Its default class works too (`--model openai/main` alone), but imports litellm: five CPU seconds for each episode.
"""

from __future__ import annotations

import os
from typing import Any

from minisweagent.models.openrouter_model import OpenRouterModel


class EndpointModel(OpenRouterModel):  # type: ignore[misc]  # mini-swe-agent has an environment of its own
    """Chat completions at `OPENAI_BASE_URL`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._api_url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
        self._api_key = os.environ["OPENAI_API_KEY"]
