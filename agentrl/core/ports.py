"""The ports: the interfaces between the loop and engines, trainers, chat formats, journals and workers.

Adapters implement them in `engines/`, `learn/`, `cluster/`, `rollout/`, `journal/`; `app/` wires one of each.
Everything above the ports runs without torch, ray and vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, runtime_checkable

from agentrl.core.errors import EngineError, NoRoomError

if TYPE_CHECKING:
    from agentrl.core.records import (
        EpisodeHeader,
        EpisodeSpec,
        FinishReason,
        Float32Array,
        ForkPoint,
        Int32Array,
        Message,
        PolicyVersion,
        ProcessStatus,
        ProposalNovelty,
        SampledTurn,
        Score,
        ScoreRequest,
        StepReport,
        Task,
        ToolCall,
        ToolSpec,
        TrainBatch,
        WeightsRef,
    )
    from agentrl.core.tokens import Completion, Tokens

Refresh = Literal["token", "turn", "episode", "lazy"]
"""Moment at which a session moves to newer weights: between tokens, between turns, never, or when its lag reaches the
bound."""


LEAST_TEMPERATURE, LARGEST_TEMPERATURE = 0.01, 2.0
"""Bounds of temperatures above 0. The gradient of a token grows with its temperature's inverse, and vLLM samples at no
others: it raises lower ones to 0.01, in silence."""


# --- engines ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapabilities:
    """An engine's capabilities. A run that needs more refuses to start."""

    name: str
    refresh: frozenset[Refresh]
    expert_routing: bool
    sampling_mask: bool
    adapters: int
    """Number of adapters the engine serves side by side; 0: full weights only."""
    merged: frozenset[str] = frozenset()
    """Policies whose adapters the engine merges into its base model."""
    max_context: int
    """Longest context in tokens, including the completion."""
    exact_continuation: bool = True
    """Whether an interrupted turn, continued, samples the tokens it would have sampled uninterrupted. If not, its
    tokens are kept, and later ones are drawn with new random numbers."""
    kv_tokens: int | None = None
    """Capacity of the KV cache in tokens, shared by all conversations, also between their turns; None: each
    conversation has its own share."""
    prefill_rate: float = math.inf
    """Tokens of context computed per second on an idle engine."""
    keeps_version: frozenset[str] = frozenset()
    """Policies whose conversations stay on the version that sampled their first token (refresh `episode`). A session
    reopened for such a conversation must be pinned to that version."""
    shares_prefixes: bool = False
    """Whether shared prefixes are stored once."""
    grammars: bool = False
    """Whether the engine enforces the grammar of a call."""
    choices: bool = False
    """Whether the engine enforces the choices of a call."""
    places: int = 0
    """Number of turns that the engine samples at once; 0: unknown. Further calls wait in it."""

    def __post_init__(self) -> None:
        if not self.prefill_rate > 0:
            raise EngineError(f"engine {self.name!r} declares prefill_rate = {self.prefill_rate}; it must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters. Filters apply in vLLM's order: temperature, min-p, top-k, top-p. Each sees the renormalized
    distribution that the one before left. Penalties apply before them."""

    max_tokens: int
    temperature: float = 1.0
    """Divisor of the logits; 0: the likeliest token is taken, and has log-probability 0. Of equally likely ones, vLLM
    takes any."""
    top_k: int = 0
    """Number of likeliest tokens to keep; 0: all."""
    top_p: float = 1.0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    presence_penalty: float = 0.0
    """Subtracted from the logits of the tokens that the turn has already sampled; vLLM counts from the newest
    interruption of the turn."""
    frequency_penalty: float = 0.0
    """The same, for each time that the token was sampled."""
    repetition_penalty: float = 1.0
    """Divides the logits of the tokens in the context or the turn that are above 0, and multiplies the others
    (arXiv:1909.05858)."""
    grammar: str = ""
    """What the turn's text must fit, as a structural tag of xgrammar in JSON, for engines with `grammars`; "":
    anything. Only tokens that it allows are sampled, and the kept sets say which."""
    choices: tuple[tuple[int, ...], ...] = ()
    """The texts that `grammar` allows, as tokens that a stop token follows, for engines with `choices`; (): any."""

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature == 0

    @property
    def is_filtered(self) -> bool:
        """Whether a filter excludes tokens."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def is_penalized(self) -> bool:
        """Whether a penalty changes the logits, by a rule that training does not compute."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One engine call. `token_ids` is the whole context; the session's KV cache makes the prefix free."""

    request_id: str
    token_ids: Int32Array
    sampling: SamplingParams
    seed: int
    """64 bits. The n-th sampled token depends only on (seed, n) and its distribution, never on the rest of the
    batch."""
    sampled_before: int = 0
    """Number of tokens of this turn that earlier calls sampled, at the end of `token_ids`. The first new token uses
    random number `sampled_before` of the turn, as if the turn had not been interrupted. `sampling.max_tokens` counts
    new tokens only."""
    priority: int = 0
    """Priority of the call: waiting calls with a lower value run first."""
    seat: str = ""
    """Environment and seat of the conversation. How long the engine keeps the contexts of idle conversations is learned
    for each."""
    opening: int = 0
    """`ids.opening_digest` of the context of the conversation's first turn. Conversations with the same opening share a
    prefix (members of a group, forks, a parked conversation), so they go to the same replica. 0: the whole context
    counts as the opening."""
    row: int = 0
    """Row of the conversation. A new row does not continue the context of the last one: its first call returns the
    experts of all positions, because the trainer reads each row alone."""


DELTA_SECONDS = 0.2
"""Seconds between two deliveries of a call's new tokens."""


class NewTokensCallback(Protocol):
    """Receives new tokens of a call in flight, for partial turns and live views."""

    def __call__(self, request_id: str, tokens: Tokens) -> None:
        """Receive new tokens. Called in the event loop, about every `DELTA_SECONDS`, before the call returns."""
        ...


class EngineSession(Protocol):
    """One conversation in an engine: its KV, its slot and its version pin."""

    async def generate(self, request: GenerateRequest, on_delta: NewTokensCallback | None = None) -> Completion:
        """Sample until a stop token, the limit, or an abort (which returns the partial).

        Raises:
            EngineLostError: the engine is gone; tokens given to `on_delta` are valid, the session is not.
            VersionNotServedError: the session moved to another process, which lacks the session's version.
            NoRoomError: the KV cache has no room for the context now. The call has its place in the queue: repeat it
                after `wait_for_room`.
            EngineError: the engine failed for good or refused the call; nothing of the call is kept.
        """
        ...

    async def wait_for_room(self) -> None:
        """Wait until the KV cache has room for the call that was refused; or until the session is closed or lost, which
        the next call reports."""
        ...

    def hold(self, version: PolicyVersion) -> None:
        """Stay on a version from the next call on, which must be current or pinned by `Engine.serve`, and keep the KV
        that it computed.

        Raises:
            VersionNotServedError: the engine does not serve that version; it may also be raised by the next call.
        """
        ...

    def close(self) -> None:
        """Release the KV, the slot and the lease; abort a call in flight. Idempotent."""
        ...


async def generate_when_room(
    session: EngineSession, request: GenerateRequest, on_delta: NewTokensCallback | None = None
) -> Completion:
    """Make a call as `EngineSession.generate` does, and wait for room if there is none."""
    while True:
        try:
            return await session.generate(request, on_delta)
        except NoRoomError:
            await session.wait_for_room()


@dataclass(frozen=True, slots=True, eq=False)
class TokenScores:
    """Log-probabilities of a sequence's `n` tokens under one version."""

    logprobs: Float32Array
    """Log-probability of each token given those before it, `[n]`; entry 0 is 0."""
    top_ids: Int32Array
    """Likeliest tokens at each position, `[n, k]`, the likeliest first and ties by id; row 0 is 0. `k` is at most the
    size of the vocabulary."""
    top_logprobs: Float32Array
    """Their log-probabilities, `[n, k]`; row 0 is 0."""

    @classmethod
    def after_first(
        cls, logprobs: Float32Array, top_ids: Int32Array | None = None, top_logprobs: Float32Array | None = None
    ) -> TokenScores:
        """Make a sequence's scores; the arguments begin at its second token, since the first has no context."""
        import numpy as np

        rows, nothing = ((1, 0), (0, 0)), np.zeros((len(logprobs), 0), np.float32)
        return cls(
            logprobs=np.pad(logprobs, (1, 0)).astype(np.float32, copy=False),
            top_ids=np.pad(nothing if top_ids is None else top_ids, rows).astype(np.int32, copy=False),
            top_logprobs=np.pad(nothing if top_logprobs is None else top_logprobs, rows).astype(np.float32, copy=False),
        )


class Sampler(Protocol):
    """The part of an engine that episodes use."""

    capabilities: EngineCapabilities

    def open(self, session_id: str, policy: str, *, pin: PolicyVersion | None = None) -> EngineSession:
        """Open a session for one conversation of `policy`.

        With `pin` the session stays on that version, which must be current or pinned by `Engine.serve`.

        Raises:
            EngineLostError: the engine is gone; it may accept the session later.
            VersionNotServedError: the engine does not serve that version.
            EngineError: the engine does not serve the policy.
        """
        ...

    def abort(self, request_id: str) -> None:
        """End a call in flight; it returns its partial with finish_reason `abort`."""
        ...

    async def score(
        self, version: PolicyVersion | str, token_ids: Int32Array, temperature: float = 1.0, *, top: int = 0
    ) -> TokenScores:
        """Compute the log-probability of each token given those before it, and of the `top` likeliest tokens there.

        A `str` names a policy's current version.
        """
        ...


class Engine(Sampler, Protocol):
    """An inference engine: samples, and serves the requested versions."""

    async def serve(self, current: Collection[WeightsRef], pinned: Collection[WeightsRef] = ()) -> None:
        """Serve these versions and no others; idempotent. Returns when they are served, or were superseded by a
        later `serve`, which takes effect at once.

        Args:
            current: at most one per policy: new conversations sample from it, and open ones move to it as the engine's
                refresh says. Policies without one stay as they are.
            pinned: all versions that sessions may be pinned to although they are not current. Any other version is
                released once no session and no call needs it.

        Raises:
            VersionsRefusedError: the files of some versions do not match their digest or the model: their policies stay
                at the version before, or the pins are missing. All others are served. The loss of a served pin, because
                the engine's process restarted without its files, does not raise here: sessions that ask for the pin get
                a `VersionNotServedError`.
            EngineError: the engine is closed or has failed.
        """
        ...

    async def ping(self) -> None:
        """Return once the engine accepts calls and everything in it has responded; never, if something hangs.

        Raises:
            EngineLostError: the engine failed and may recover.
            EngineFailedError: the engine is gone for good.
        """
        ...

    def busy_seconds(self) -> float:
        """Seconds spent in forward passes since the start."""
        ...

    async def close(self) -> None:
        """Release everything. Idempotent."""
        ...


# --- chat formats -----------------------------------------------------------------------------------------------------


class ChatFormat(Protocol):
    """Converts between messages and tokens for one model. Never re-tokenizes sampled tokens."""

    stop_token_ids: tuple[int, ...]
    fingerprint: bytes
    """Identifies tokenizer and template: formats with equal fingerprints produce equal tokens."""
    rewrites: tuple[str, ...]
    """Ways in which the template rewrites earlier turns; see `rollout.template_checks`."""
    forks: bool
    """Whether a rewritten history begins a new row; if not, the model keeps seeing the tokens it saw and sampled."""
    shows_tools: bool
    """Whether the prompt describes the tools that an environment offers. Many chat templates ignore them."""

    @property
    def reads_earlier(self) -> bool:
        """Whether `extend` reads `earlier`."""
        ...

    @property
    def call_frame(self) -> tuple[str, ...] | None:
        """See `ReplyFormat.call_frame`; None: a reply may begin with thinking, so no grammar of its content fits it."""
        ...

    def start(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        """Return the token ids of a new conversation, up to the start of the assistant's turn."""
        ...

    def extend(
        self,
        messages: Sequence[Message],
        *,
        after: FinishReason,
        turn: Sequence[int] = (),
        context: Sequence[int] = (),
        earlier: Sequence[Message] = (),
        tools: Sequence[ToolSpec] = (),
    ) -> list[int]:
        """Return the token ids that follow a sampled turn: its closing tokens (all of them, unless `after` is `stop`),
        the new messages, and the start of the next assistant turn.

        Args:
            messages: the new messages.
            after: why the turn ended.
            turn: its tokens. If they were cut within thinking, the thinking is closed too.
            context: tokens before the turn; only the end of its prompt matters.
            earlier: messages before these. A word in one may decide how a prompt ends, such as `/no_think`.
            tools: tools that the conversation offers; some models have another template for these conversations.
        """
        ...

    def write_reply(self, text: str, context: Sequence[int], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """Return the token ids of a reply that was not sampled, as the chat template writes it, with the token that
        ends the turn.

        Args:
            text: the reply, as the model would write it: thinking and calls between their marks.
            context: tokens before the reply; some prompts begin the thinking themselves.
            tools: tools that the conversation offers.

        Raises:
            ModelError: the template refuses the reply, or its prompt rules it out.
        """
        ...

    def rewritten(
        self, turns: Sequence[SampledTurn], messages: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> list[int] | None:
        """Return the token ids of a conversation as the template writes it now; kept parts of sampled turns stay as
        sampled.

        The result is None if the template keeps everything, or cannot be followed. Called only if `forks` is true.

        Args:
            turns: turns so far.
            messages: new messages.
            tools: tools offered to the policy.
        """
        ...

    def parse(
        self,
        token_ids: Sequence[int],
        tools: Sequence[ToolSpec] = (),
        *,
        context: Sequence[int] = (),
        reads_calls: bool = True,
    ) -> Message:
        """Parse a completion into the assistant message, with thinking and tool calls; never raises on hostile content.

        Args:
            token_ids: tokens of the completion.
            tools: the offered tools, for the types of arguments that the format writes without types.
            context: tokens before the completion; some prompts begin the thinking themselves.
            reads_calls: False: calls are part of the content.
        """
        ...

    def foreign_call(
        self, token_ids: Sequence[int], tools: Sequence[ToolSpec], *, context: Sequence[int] = ()
    ) -> ToolCall | None:
        """Return the call that a completion holds in a form that `parse` does not read; see
        `core.reply_formats.find_foreign_call`."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, including special tokens."""
        ...

    def encode(self, text: str, context: Sequence[int] = ()) -> list[int]:
        """Token ids of text, as the template tokenizes it: at the start of a text, or as the reply to a prompt that
        ends with `context`."""
        ...

    def drift(self, token_ids: Sequence[int], context: Sequence[int] = ()) -> str | None:
        """Explain why the text of tokens sampled after `context` would be tokenized differently; None if it would
        not."""
        ...


# --- trainers ---------------------------------------------------------------------------------------------------------


class Trainer(Protocol):
    """Trains all policies of a run. Calls are idempotent by step id."""

    async def start(self, resume_from: str | None = None) -> Sequence[str]:
        """Load the models and, on resume, a checkpoint directory. The caller names the versions and calls `publish`
        next.

        Returns:
            Lines for the user about the trained parameters, such as an adapter's layers.
        """
        ...

    async def forward_backward(self, batch: TrainBatch) -> None:
        """Accumulate the gradient of a batch, whose token data is at the locations in its units. A failure discards
        what was accumulated for the step.

        Raises:
            UntrainableUnitsError: rows of some units cannot be trained; nothing of the batch was accumulated.
            EngineLostError: a process of the trainer was lost.
        """
        ...

    async def optim_step(self, policy: str, step_id: int) -> StepReport:
        """Apply the accumulated gradient; one that is exactly 0, as without units, leaves the weights unchanged.
        Repeating the last applied step id returns its report.

        Raises:
            NonFiniteError: loss or gradient is not finite; the weights are unchanged.
        """
        ...

    async def publish(self, policy: str, version: PolicyVersion) -> WeightsRef:
        """Write the policy's weights as an immutable version."""
        ...

    async def save(self, directory: str) -> None:
        """Write every policy's weights, optimizer state and random state into an empty directory; the caller syncs
        it."""
        ...

    async def close(self) -> None:
        """Release everything. Idempotent."""
        ...


# --- workers ----------------------------------------------------------------------------------------------------------


ScoreOf = Literal["turn", "episode", "group", "request"]
"""What a scorer scores: every turn, whole conversations, those of a group together, or the turns for which `ctx.score`
asks."""


ScoreCredit = Literal["reward", "difference", "note"]
"""What a score is credited as: a reward, its difference to the agent's score before it, or nothing."""


class Scorer(Protocol):
    """Gives turns or conversations a reward of its name."""

    @property
    def name(self) -> str:
        """Name of the scorer, and of the reward that it gives."""
        ...

    @property
    def per(self) -> ScoreOf:
        """What it scores."""
        ...

    @property
    def credit(self) -> ScoreCredit:
        """What its scores are credited as."""
        ...

    async def score(self, request: ScoreRequest) -> Score:
        """Return a score.

        Raises:
            EpisodeError: the scorer failed; its unit is dropped.
            ScorerError: the scorer returned something that is not a score.
        """
        ...


class EpisodeHost(Protocol):
    """The orchestrator's interface to a running episode: child episodes, proposals, attempts, metrics."""

    def spawn(
        self,
        parent: EpisodeSpec,
        environment: str,
        tasks: Sequence[Task],
        spawn_call: str,
        on_end: Callable[[int, EpisodeHeader], None],
        known: Sequence[str],
    ) -> None:
        """Admit and start one child episode per task, as a group; call `on_end(index, header)` once for each.

        A child that is already running (its parent was resumed) is not started again. `known` holds the ids of the
        children in the entry of the call. Those of the episode that a fork came from are shared if they ended or still
        run; the others start over.
        """
        ...

    async def branch(
        self, main: EpisodeSpec, point: ForkPoint, count: int, versions: Mapping[str, PolicyVersion]
    ) -> Mapping[str, PolicyVersion]:
        """Admit and start the branches of a call, except those that exist: `main` was resumed.

        Args:
            main: the main episode.
            point: the call; `branch` is set for each branch.
            count: number of branches.
            versions: version that sampled the newest token of each policy.

        Returns:
            The versions on which the whole tree must stay, by policy; served until its last episode has ended.

        Raises:
            EpisodeError: a version can no longer be served.
        """
        ...

    async def remember(self, spec: EpisodeSpec, call_id: str, key: str, structure: str) -> ProposalNovelty:
        """Record a proposal with its structure, and return how often similar ones were proposed.

        Repeating a call counts it only once.
        """
        ...

    def readmit(self, spec: EpisodeSpec) -> None:
        """Start a further attempt of a running episode."""
        ...


class PolicyCounts(NamedTuple):
    """The counts of one policy in one episode: its turns, and the values of `ctx.metric`."""

    turns: int
    """Turns of the policy's agents."""
    metrics: dict[str, float]


class Worker(Protocol):
    """Runs episodes. Calls `on_end` once for each spec that was not cancelled, after its commit is durable."""

    last_failure: str
    """Detail of the last dropped episode, for people."""

    def submit(self, spec: EpisodeSpec, on_end: Callable[[EpisodeHeader], None], *, resume: bool = False) -> None:
        """Start an episode; never blocks. With `resume`, replay its recorded entries first."""
        ...

    def park(self, episode_id: str) -> bool:
        """Park an episode: cut its calls in flight and write their tokens to disk, release its slots and KV, hold its
        next call, and stop its clock. Code and tools that run continue. Returns whether the episode is in flight here.
        """
        ...

    def unpark(self, count: int = 1) -> tuple[str, ...]:
        """Resume up to `count` parked episodes in deadline order: lowest step of the oldest weights plus the policy's
        `max_staleness` first, ties by episode id. Returns their ids."""
        ...

    def activity(self) -> Mapping[str, float]:
        """Return what the episodes have spent their time on; see `observe.bottleneck.ActivityClock.totals`."""
        ...

    async def cancel(self) -> None:
        """Stop everything in flight without reporting it; the journal holds the episodes as unfinished."""
        ...


# --- observers --------------------------------------------------------------------------------------------------------


@runtime_checkable
class ProcessStatusSource(Protocol):
    """A part of a run with separate processes: workers, engines, trainer ranks."""

    def statuses(self) -> list[ProcessStatus]:
        """Return the node and the activity of each process. Must be cheap, because it is called every second."""
        ...


class Observer(Protocol):
    """Observes a run: progress bars, sinks, or a user's code. Called in the event loop; must return at once."""

    def on_step(self, policy: str, step: int, metrics: Mapping[str, float]) -> None:
        """Receive the metrics of an optimizer step, whose version is served now; `observe/metrics.py` names the
        metrics."""
        ...

    def on_evaluation(self, versions: Mapping[str, PolicyVersion], metrics: Mapping[str, Mapping[str, float]]) -> None:
        """Receive the metrics of an evaluation of these versions, keyed by policy."""
        ...
