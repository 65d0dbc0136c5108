"""The ports: what the loop asks of engines, trainers, chat formats, journals and workers, and nothing more.

Adapters implement them in `engines/`, `learn/`, `cluster/`, `rollout/`, `journal/`; `app/` wires one of each.
Everything above the ports runs without torch, ray and vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from agentrl.core.errors import EngineError

if TYPE_CHECKING:
    from agentrl.core.records import (
        Completion,
        EpisodeHeader,
        EpisodeSpec,
        FinishReason,
        Float32Array,
        Int32Array,
        Message,
        PolicyVersion,
        Recollection,
        StepReport,
        Task,
        ToolSpec,
        TrainBatch,
        WeightsRef,
    )

Refresh = Literal["token", "turn", "episode", "lazy"]
"""When a session moves to newer weights: between two tokens, two turns, never, or when its lag reaches the bound."""


# --- engines ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapabilities:
    """What an engine can give; asked for more, a run refuses to start."""

    name: str
    refresh: frozenset[Refresh]
    expert_routing: bool
    sampling_mask: bool
    adapters: int
    """How many adapters it serves side by side; 0: full weights only."""
    max_context: int
    """Longest context in tokens, completion included."""
    exact_continuation: bool = True
    """Whether a turn that was cut and goes on samples what it would have sampled uncut. Where not, its tokens are kept
    all the same, and those that follow are drawn anew."""
    kv_tokens: int | None = None
    """Tokens of context whose keys and values fit, of all conversations together, those between two turns included;
    None: what a conversation may keep does not depend on the others."""
    prefill_rate: float = math.inf
    """Tokens of context computed per second, with nothing else to do."""
    shares_prefixes: bool = False
    """Whether what two conversations begin with alike is held once."""

    def __post_init__(self) -> None:
        if not self.prefill_rate > 0:
            raise EngineError(f"engine {self.name!r} computes {self.prefill_rate} tokens of context per second")

    def share(self, parts: int) -> EngineCapabilities:
        """What one of so many has of the engine, who do not know what the others have in it."""
        tokens = None if self.kv_tokens is None else self.kv_tokens // parts
        return replace(self, kv_tokens=tokens, prefill_rate=self.prefill_rate / parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample. Filters apply in the order temperature, top-k, top-p, min-p."""

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    """0: off."""
    top_p: float = 1.0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()

    @property
    def is_filtered(self) -> bool:
        """Whether tokens are left out."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One engine call. Token in: `token_ids` is the whole context; the session's KV makes the prefix free."""

    request_id: str
    token_ids: Int32Array
    sampling: SamplingParams
    seed: int
    """64 bits; the n-th sampled token depends on (seed, n) and the distribution, never on the company in the batch."""
    sampled_before: int = 0
    """Tokens of this turn sampled by earlier calls, at the end of `token_ids`: the first new one is number n of the
    turn's random numbers, as if the turn had not been interrupted. `sampling.max_tokens` counts new tokens only."""
    priority: int = 0
    """Where calls wait, lower is served first."""


class Delta(Protocol):
    """Receives a chunk of new tokens of a running call, for partials and live views."""

    def __call__(
        self, request_id: str, token_ids: Sequence[int], logprobs: Sequence[float], version: PolicyVersion
    ) -> None:
        """Called from the event loop, about every 200 ms per call, before the call returns."""
        ...


class EngineSession(Protocol):
    """One conversation's place in an engine: its KV, its slot, its version pin."""

    async def generate(self, request: GenerateRequest, on_delta: Delta | None = None) -> Completion:
        """Sample until a stop token, the limit, or an abort (which returns the partial).

        Raises:
            EngineLostError: the engine is gone; what `on_delta` was given is good, and this session is not any more.
            EngineError: the engine died for good or refused; nothing of the call is kept.
        """
        ...

    def close(self) -> None:
        """Give the KV, the slot and the lease back; a call in flight is aborted. Idempotent."""
        ...


class Sampler(Protocol):
    """Who samples, as far as an episode needs it."""

    capabilities: EngineCapabilities

    def open(self, session_id: str, policy: str, *, pin: PolicyVersion | None = None) -> EngineSession:
        """A session for one conversation of `policy`.

        With `pin` the session stays on that version, which must have been given by `update` (and kept).

        Raises:
            EngineLostError: the engine is gone; it may take the session later.
            EngineError: it does not serve the policy, or not that version.
        """
        ...

    def abort(self, request_id: str) -> None:
        """End a call in flight; it returns its partial with finish_reason `abort`."""
        ...


class Engine(Sampler, Protocol):
    """Who samples, and serves the versions that its owner gives it."""

    async def update(self, weights: WeightsRef, *, keep: bool = False) -> None:
        """Serve a new version between two forward passes; with `keep` it stays available to pins until `release`,
        once for each time it was kept.

        Raises:
            EngineError: the files do not match their digest or the model; the old version keeps serving.
        """
        ...

    def release(self, version: PolicyVersion) -> None:
        """Take one `keep` back; a version that is kept no more is forgotten once no session pins it."""
        ...

    async def ping(self) -> None:
        """Return when the engine takes calls and all that computes has been heard from: never, where it hangs.

        Raises:
            EngineLostError: it is gone, and may come back.
            EngineFailedError: it is gone for good.
        """
        ...

    async def score(
        self, version: PolicyVersion | str, token_ids: Int32Array, temperature: float = 1.0
    ) -> Float32Array:
        """Log-probability of each token given those before it; entry 0 is 0. A str names a policy's current version."""
        ...

    def busy_seconds(self) -> float:
        """Seconds spent in forward passes since the start."""
        ...

    async def close(self) -> None:
        """Release everything. Idempotent."""
        ...


# --- chat formats -----------------------------------------------------------------------------------------------------


class ChatFormat(Protocol):
    """Between messages and tokens, for one model. Sampled tokens are never re-tokenised."""

    stop_token_ids: tuple[int, ...]
    fingerprint: bytes
    """Of all that tokens are made with (tokenizer, template): where it is the same, so are the tokens of a message."""

    def start(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """Token ids of a new conversation, up to where the assistant's turn begins."""
        ...

    def extend(self, messages: Sequence[Message], *, after: FinishReason) -> list[int]:
        """Token ids that follow a sampled turn: what closes it (all, unless `after` is `stop`), the new messages,
        and what begins the next assistant turn.
        """
        ...

    def parse(self, token_ids: Sequence[int]) -> Message:
        """The assistant message a completion says, tool calls included; never raises on hostile content."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, special tokens included."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of text as the template would tokenise it."""
        ...

    def drift(self, token_ids: Sequence[int]) -> str | None:
        """Why sampled tokens differ from how their own text would be tokenised; None where they do not."""
        ...


# --- trainers ---------------------------------------------------------------------------------------------------------


class Trainer(Protocol):
    """Who learns. One trainer serves all policies of a run; calls are idempotent by step id."""

    async def start(self, resume_from: str | None = None) -> Sequence[str]:
        """Load models and, on resume, a checkpoint directory. Versions are the caller's, who calls `publish` next.

        Returns:
            Lines for people about what is trained, such as the layers that an adapter is on.
        """
        ...

    async def forward_backward(self, batch: TrainBatch) -> None:
        """Accumulate the gradient of a batch; token data is read where its units say it lies."""
        ...

    async def optim_step(self, policy: str, step_id: int) -> StepReport:
        """Apply the accumulated gradient; of batches without units: leave the weights as they are. Repeating the last
        applied step id returns its report.

        Raises:
            NonFiniteError: loss or gradient is not finite; the weights are as before.
        """
        ...

    async def publish(self, policy: str, version: PolicyVersion) -> WeightsRef:
        """Write the policy's weights as an immutable version."""
        ...

    async def save(self, directory: str) -> None:
        """Write every policy's weights, optimizer and random state into an empty directory; the caller syncs it."""
        ...

    async def close(self) -> None:
        """Release everything. Idempotent."""
        ...


# --- workers ----------------------------------------------------------------------------------------------------------


class EpisodeHost(Protocol):
    """What a running episode may ask of the orchestrator, and tells it: child episodes, its own numbers."""

    def spawn(
        self,
        parent: EpisodeSpec,
        environment: str,
        tasks: Sequence[Task],
        spawn_call: str,
        on_end: Callable[[int, EpisodeHeader], None],
        known: Sequence[str] = (),
    ) -> SpawnedGroup:
        """Admit and start one child episode per task, a group; `on_end(index, header)` is called once for each.

        A child that lives already (its parent was resumed) is not started again. `known` are the ids of children that
        the parent of a fork spawned by this call: those that ended or still run are shared, the others started anew.
        """
        ...

    async def remember(self, spec: EpisodeSpec, call_id: str, key: str, structure: str) -> Recollection:
        """What the run knows of a proposal; from then on it knows this one. Told twice by one call: known once."""
        ...

    def readmit(self, spec: EpisodeSpec) -> None:
        """A further attempt of a running episode begins."""
        ...

    def measured(self, spec: EpisodeSpec, header: EpisodeHeader, counted: Mapping[str, Counted]) -> None:
        """Hear what a committed episode counted (`ctx.metric`) for each policy that acted, for their steps' metrics."""
        ...


class Commits(Protocol):
    """Where the end of an episode is recorded."""

    async def commit_episode(
        self, spec: EpisodeSpec, header: EpisodeHeader, digest: bytes, metrics: Mapping[str, float], detail: str = ""
    ) -> None:
        """Record a committed or dropped episode with its query columns, once its entries are on disk; waits for it.

        `detail` says why it was dropped, for people: at most 2 KB are kept.
        """
        ...


class Counted(NamedTuple):
    """What an episode counted for one policy."""

    turns: int
    """Of its agents."""
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnedGroup:
    """The children of one spawn call."""

    group_id: str
    episode_ids: tuple[str, ...]


class Worker(Protocol):
    """Runs episodes. `on_end` is called once for each spec that was not cancelled, its commit durable before."""

    last_failure: str
    """What the last dropped episode said, for people."""

    def submit(self, spec: EpisodeSpec, on_end: Callable[[EpisodeHeader], None], *, resume: bool = False) -> None:
        """Start an episode; never blocks. With `resume` its recorded entries are replayed before it goes on."""
        ...

    def park(self, episode_id: str) -> bool:
        """Take an episode out of the engine: its calls in flight are cut and their tokens put on disk, its slots and KV
        given back, its next call waits, its time stands still; code and tools that run go on. Returns whether it is in
        flight here.
        """
        ...

    def unpark(self, count: int = 1) -> tuple[str, ...]:
        """Let parked episodes go on, up to `count`, in deadline order: first the one whose oldest weights plus the
        policy's `max_staleness` is lowest, ties by episode id. Returns which.
        """
        ...

    async def drain(self) -> None:
        """Wait until nothing is in flight."""
        ...

    async def cancel(self) -> None:
        """Stop everything in flight without reporting it: the journal knows the episodes as unfinished."""
        ...


# --- observers --------------------------------------------------------------------------------------------------------


class Observer(Protocol):
    """Sees a run go by: progress bars, sinks, the caller's own. Called in the event loop; must return at once."""

    def on_step(self, policy: str, step: int, metrics: Mapping[str, float]) -> None:
        """An optimizer step was taken and its version is served; metric names are in `observe/metrics.py`."""
        ...

    def on_evaluation(self, versions: Mapping[str, PolicyVersion], metrics: Mapping[str, Mapping[str, float]]) -> None:
        """An evaluation of these versions ended; metrics of each policy."""
        ...
