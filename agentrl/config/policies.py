"""The kinds of policies: weights that learn or stay frozen, remote endpoints, bots, and past versions as opponents.

A tagged union by `kind`; a setting that a kind cannot have does not parse. `RunConfig.seats` binds seats to policies.
"""

from __future__ import annotations

import ipaddress
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from agentrl.config.fields import (
    Code,
    DerivedDefault,
    Endpoint,
    Episodes,
    Fixed,
    Free,
    Label,
    Location,
    MaybeSteps,
    NumberUnit,
    PerEpisode,
    Positive,
    Rate,
    Seconds,
    Section,
    Steps,
    Variable,
    WaveFixed,
    resolve_package_directory,
)


class LoraConfig(Section):
    """Low-rank adapters (Hu et al., 2021, arXiv:2106.09685) instead of full weights."""

    rank: Fixed[Positive] = 16
    """Inner dimension of the adapter. A larger rank is more expressive, and makes published versions larger."""
    alpha: Fixed[Rate] = 32.0
    """The adapter's output is multiplied by alpha / rank."""
    target_modules: Fixed[Label[tuple[str, ...]]] = ()
    """Linear layers that get an adapter, by full name or its last part. Empty: all decoder layers that can be trained
    and served. A run prints them at startup."""
    merge: Fixed[bool] = False
    """Let engines merge the adapter into the base model. They then sample faster, but serve one version at a time, and
    the embedded engine keeps a second copy of the adapted layers. Versions are published as adapters either way. In
    bfloat16, updates much smaller than the weights are lost to rounding."""


class _SampledPolicy(Section):
    sampling: PerEpisode[Label[dict[str, int | float]]] = {}
    """Sampling settings of this policy, in place of those in `[sampling]`."""


STALENESS_CHOICES = (0, 1)
"""Bounds between which a run chooses with `max_staleness = "auto"`."""


class LocalPolicy(_SampledPolicy):
    """A policy served by an engine of the run: its weights are trained or frozen."""

    model: Fixed[Location[str]] = ""
    """Base model of this policy, in the form of `model.path`, which is the default. Policies with adapters on one base
    model share its weights and engine."""

    @field_validator("model")
    @classmethod
    def _find_model(cls, model: str) -> str:
        return resolve_package_directory(model) if model else model


class PolicyConfig(LocalPolicy):
    """A policy that learns, the default: an adapter on the base model, or full weights."""

    kind: Fixed[Literal["trained"]] = "trained"
    """Kind of the policy; `trained`, the default, means weights that learn."""
    lora: Fixed[LoraConfig | None] = None
    """Shape of the adapter to train; null trains full weights."""
    reference: Fixed[Location[str]] = ""
    """Frozen weights with the same tokenizer, loaded by every trainer rank: the target of `trainer.loss.kl` and the
    teacher of `distillation`. A model, in the form of `model.path`, or an adapter of this policy's base model, such as
    another run's `policies/NAME`. Empty: the base model without the adapter."""
    learning_rate: Annotated[Free[Rate], DerivedDefault("by the model's size, docs/how-to/settings.md")] = 1e-5
    """AdamW learning rate after warm-up. A run prints it at startup."""
    step_size: WaveFixed[Episodes] = 64
    """Units per optimizer step. A unit is the policy's part of one episode."""
    max_staleness: WaveFixed[Literal["auto"] | MaybeSteps] = "auto"
    """Upper bound on the mean staleness of trained units, in optimizer steps. 0: synchronous training. `auto`: the
    run times a few steps with 0 and a few with 1, and keeps 0 unless its steps take over 10% longer. The mean is over
    all steps since the last resume: a single step may exceed it, and so do episodes that began before a resume
    (docs/explanation/off_policy.md)."""
    max_lag: WaveFixed[MaybeSteps | None] = None
    """Upper bound on the staleness of every trained token, in optimizer steps; null: none. Older tokens are not
    trained, later tokens of the same episode are (docs/explanation/off_policy.md)."""

    @property
    def staleness_choices(self) -> tuple[int, ...]:
        """Values that the bound on staleness may take while the run runs, in ascending order."""
        if self.max_staleness != "auto":
            return (self.max_staleness,)
        return tuple(bound for bound in STALENESS_CHOICES if self.max_lag is None or bound <= self.max_lag)

    @property
    def largest_staleness(self) -> int:
        """Largest value that the bound on staleness may take, for all that is sized by it."""
        return self.staleness_choices[-1]

    @property
    def served_adapter(self) -> LoraConfig | None:
        """The adapter of the versions that engines serve; None if those are full weights."""
        return None if self.lora is None or self.lora.merge else self.lora

    @field_validator("reference")
    @classmethod
    def _find_reference(cls, reference: str) -> str:
        return resolve_package_directory(reference) if reference else reference


class FrozenPolicy(LocalPolicy):
    """Weights that never change, for opponents and judges."""

    kind: Fixed[Literal["frozen"]]
    """Kind of the policy; `frozen` means weights that no step changes."""
    path: Fixed[Location[str]] = ""
    """Trained weights, such as another run's `policies/NAME`: full weights, or an adapter of the policy's base model.
    Empty: the base model."""
    scored: Fixed[bool] = False
    """Whether scorers score its turns in a run without policies that learn; set in evaluations and forks for the
    policies that learned. If it is false for all, the turns of all policies with weights are scored."""

    @field_validator("path")
    @classmethod
    def _find_package_directory(cls, path: str) -> str:
        return resolve_package_directory(path) if path else path


class ExternalPolicyConfig(Section):
    """A policy that no engine of the run serves: it receives messages and returns one, which is recorded and never
    trained."""


class RemotePolicy(_SampledPolicy, ExternalPolicyConfig):
    """An endpoint that speaks OpenAI's chat completions. Its answers are recorded and never trained."""

    kind: Fixed[Literal["remote"]]
    """Kind of the policy; `remote` means a model behind an external endpoint."""
    url: Fixed[Endpoint[str]]
    """Base URL, such as `https://api.example.com/v1`. Requests go to `/chat/completions` below it."""
    model: Fixed[Endpoint[str]]
    """The endpoint's name for the model."""
    api_key_env: Free[Variable[str]] = ""
    """Environment variable that holds the API key; empty: no key is sent. Never write the key into a file."""
    timeout_s: Free[Seconds] = 60.0
    """Time limit of a request, until the complete answer has arrived. Timeouts and overload errors are retried up to
    eight times, after 1 to 30 s."""
    max_concurrent: Free[Annotated[Positive, NumberUnit("requests")]] = 64
    """Maximum number of concurrent requests, divided evenly among the `workers`."""

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not the URL of an endpoint, such as https://api.example.com/v1")
        if parts.username is not None or parts.password is not None or parts.query:
            raise ValueError(
                "the URL contains a key or password, and URLs are written into the run's files: remove it, and use "
                "api_key_env"
            )
        return url.rstrip("/")

    def check(self) -> None:
        parts = urlsplit(self.url)
        if self.api_key_env and parts.scheme == "http" and not _is_loopback(parts.hostname or ""):
            raise ValueError(
                f"api_key_env = {self.api_key_env!r} with {self.url}: the key would be sent unencrypted. Use https, or "
                "a tunnel to this machine; or remove api_key_env if the endpoint needs no key"
            )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class BotPolicy(ExternalPolicyConfig):
    """A program that holds a seat: a rule-based opponent, or a scripted user."""

    kind: Fixed[Literal["bot"]]
    """Kind of the policy; `bot` means a function instead of weights."""
    id: Fixed[Code[str]]
    """`module:function` or `path/to/file.py:function`. The function receives the seat's conversation, a sequence of
    `agentrl.Message`, and a `random.Random` for the turn, and returns the reply."""


class OpponentPoolPolicy(Section):
    """Past versions of a policy that learns, as its opponents. Each group of episodes draws one."""

    kind: Fixed[Literal["past"]]
    """Kind of the policy; `past` means earlier weights of another policy."""
    of: Fixed[Label[str]]
    """Policy whose past versions play."""
    every: Fixed[Steps] = 10
    """Interval at which the policy's newest version joins the pool. The pool starts with the run's first version."""
    size: Free[Annotated[int, Field(gt=0, le=10**4), NumberUnit("versions")]] = 4
    """Maximum number of versions in the pool; the newest are kept. Each needs an adapter slot of the engine, or a copy
    of the weights."""
    choose: Free[Literal["uniform", "latest", "prioritized"]] = "uniform"
    """How a group's opponent is drawn. `uniform`: all versions are equally likely. `latest`: the newest. `prioritized`:
    in proportion to (1 - win rate)², which favors hard opponents (PFSP, AlphaStar)."""


AnyPolicy = Annotated[
    PolicyConfig | FrozenPolicy | RemotePolicy | BotPolicy | OpponentPoolPolicy, Field(discriminator="kind")
]
