"""Who can hold a seat: weights that learn or stay frozen, an endpoint elsewhere, past versions of what learns.

A tagged union by `kind`; what a kind cannot have does not parse. Which seat is whose is `RunConfig.seats`.
"""

from __future__ import annotations

import ipaddress
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from agentrl.config.section import (
    Episodes,
    Fixed,
    Free,
    MaybeSteps,
    PerEpisode,
    Positive,
    Rate,
    Seconds,
    Section,
    Steps,
    Unit,
    WaveFixed,
    package_directory,
)


class LoraConfig(Section):
    """Low-rank adapters (Hu et al., 2021, arXiv:2106.09685) instead of full weights."""

    rank: Fixed[Positive] = 16
    """Inner dimension of the adapter: what it can express, and what a published version weighs."""
    alpha: Fixed[Rate] = 32.0
    """The adapter's output is scaled by alpha / rank."""
    target_modules: Fixed[tuple[str, ...]] = ()
    """Linear layers that get an adapter, by the last part of their names or the whole; empty: all of the decoder's that
    can be both trained and served. Which those are, and their share of the weights, is said at start."""


class _Sampled(Section):
    sampling: PerEpisode[dict[str, int | float]] = {}
    """Settings of `[sampling]` that are others for this policy, such as `temperature` or `max_tokens`."""


class PolicyConfig(_Sampled):
    """A policy that learns: an adapter on the base model, or all weights."""

    kind: Fixed[Literal["trained"]] = "trained"
    """The default: weights that learn."""
    lora: Fixed[LoraConfig | None] = None
    """Train an adapter of this shape; null trains all weights."""
    learning_rate: Free[Rate] = 3e-4
    """Of AdamW, after warm-up."""
    step_size: WaveFixed[Episodes] = 64
    """Units (episodes, as this policy saw them) per optimizer step."""
    max_staleness: WaveFixed[MaybeSteps] = 1
    """Bound on the mean policy lag in optimizer steps; 0 is synchronous training."""
    max_lag: WaveFixed[MaybeSteps | None] = None
    """Limit on the lag of every trained token in optimizer steps, kept by admission and never by dropping: while a slow
    episode could be overtaken more often, nothing new is let in (docs/off_policy.md); null: none."""
    steps: Free[MaybeSteps] = 0
    """How often it is updated, where not as often as the run's `steps` says; 0: as often."""


class FrozenPolicy(_Sampled):
    """Weights that never change, for opponents and judges."""

    kind: Fixed[Literal["frozen"]]
    """Weights that no step changes."""
    path: Fixed[str] = ""
    """A directory of trained weights, an adapter of the base model or all of its weights, such as another run's
    `policies/NAME`, found as `model.path` is; empty: the base model as it is."""

    @field_validator("path")
    @classmethod
    def _find_package_directory(cls, path: str) -> str:
        return package_directory(path) if path else path


class ExternalPolicyConfig(Section):
    """What no engine of ours serves: it is told messages and says a message, recorded and never trained."""


class RemotePolicy(_Sampled, ExternalPolicyConfig):
    """An endpoint that speaks OpenAI's chat completions. What it says is recorded and never trained."""

    kind: Fixed[Literal["remote"]]
    """Weights that somebody else holds."""
    url: Fixed[str]
    """Its base, such as `https://api.example.com/v1`; `/chat/completions` is asked."""
    model: Fixed[str]
    """What the endpoint calls the model."""
    api_key_env: Free[str] = ""
    """The environment variable that holds the key; empty: none is sent. The key itself belongs in no file."""
    timeout_s: Free[Seconds] = 60.0
    """A request, from its connection to the last byte of its answer; one that takes longer is made again, as after an
    overload: up to eight times, with waits of 1 to 30 s in between."""
    max_concurrent: Free[Annotated[Positive, Unit("requests")]] = 64
    """Requests made at once; further ones wait, and their `timeout_s` begins when they are made."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no address of an endpoint, such as https://api.example.com/v1")
        if parts.username is not None or parts.password is not None or parts.query:
            raise ValueError("an address is written into the run's files, so no key belongs in it: use api_key_env")
        return url.rstrip("/")

    @model_validator(mode="after")
    def _check_secrecy(self) -> RemotePolicy:
        parts = urlsplit(self.url)
        if self.api_key_env and parts.scheme == "http" and not _is_loopback(parts.hostname or ""):
            raise ValueError(
                f"api_key_env = {self.api_key_env!r} with {self.url}: anybody on the way could read it. Use https, "
                "or a tunnel to this machine; or leave api_key_env out, where the endpoint wants none"
            )
        return self


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class BotPolicy(ExternalPolicyConfig):
    """A program that holds a seat: an opponent that plays by rule, a user that asks from a script."""

    kind: Fixed[Literal["bot"]]
    """No weights, but a function."""
    id: Fixed[str]
    """`module:function`, or `path/to/file.py:function`, in a TOML file relative to that file. It is given the seat's
    conversation, a sequence of `agentrl.Message`, and a `random.Random` of the turn's own, and returns what it says."""


class OpponentPoolPolicy(Section):
    """Past versions of a policy that learns, as opponents to it: one is drawn for each group of episodes."""

    kind: Fixed[Literal["past"]]
    """Weights that another policy had."""
    of: Fixed[str]
    """The policy whose past versions play."""
    every: Fixed[Steps] = 10
    """Steps of that policy between two versions that join; the one a run starts from is the first."""
    size: Free[Annotated[int, Field(gt=0, le=10**4), Unit("versions")]] = 4
    """How many of the newest that joined are played against; each takes a place in the engine."""
    choose: Free[Literal["uniform", "latest", "prioritised"]] = "uniform"
    """`uniform`; `latest`: the newest that joined; `prioritised`: more often those that are won against less often, in
    proportion to (1 - win rate)² (PFSP: Vinyals et al., 2019, Nature 575)."""


AnyPolicy = Annotated[
    PolicyConfig | FrozenPolicy | RemotePolicy | BotPolicy | OpponentPoolPolicy, Field(discriminator="kind")
]
