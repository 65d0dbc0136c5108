"""A server for clients of the Tinker protocol: their models, in the order of their requests, over the journal.

A client's model is an adapter on a base model. Its requests are executed by their sequence numbers in one thread;
models take turns by the tokens that they trained on. The journal decides everything: a request is in it before the
client knows its id, and a result before the client can see it. What is in memory follows from it. A model that is not
in memory, after a start or because others took its place, is read from its newest checkpoint, and the requests since
then are executed again, from their recorded bodies; each repeated step must have the gradient norm that it had.

Invariants: an acknowledged step is part of every later version, once; what another owner has does not exist; a result
never changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import secrets
import shutil
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from agentrl.app.engines import make_engine
from agentrl.app.hub import check_local_models
from agentrl.app.plan import with_chosen_settings
from agentrl.app.run_parts import make_chat_format
from agentrl.app.tinker_samples import ClientSampler, SamplingSource, check_sample
from agentrl.config.policies import LoraConfig
from agentrl.config.sections import ModelConfig
from agentrl.config.server import ServerConfig
from agentrl.core.clock import Clock, SystemClock
from agentrl.core.errors import (
    AgentRLError,
    ConfigError,
    InputError,
    JournalError,
    NonFiniteError,
    StorageError,
    TrainerError,
    format_foreign_error,
)
from agentrl.core.files import rename_durably, staging_directory
from agentrl.core.ids import is_safe_name
from agentrl.core.records import PolicyVersion, StepReport, TrainBatch, WeightsRef
from agentrl.gateway import tinker_messages as messages
from agentrl.gateway.calls import RequestRefusedError
from agentrl.journal.port import StepRow
from agentrl.journal.requests import ClientRequest, RequestLog, RequestResult
from agentrl.observe.run_directory import RunDirectory
from agentrl.orchestrator.versions import record_published_version

if TYPE_CHECKING:
    from agentrl.config.run import RunConfig
    from agentrl.core.ports import ChatFormat, Engine
    from agentrl.journal.store import SqliteJournal
    from agentrl.learn.client_training import AdapterTrainer, ClientRow

MAX_WAITING = 4096
"""Maximum number of accepted requests of one model, or of samples of one owner, that are not finished."""
MAX_SAMPLING = 256
"""Maximum number of requests for samples of one owner that are executed at once; others wait on disk."""
MAX_TTL_S = 1 << 32
"""Maximum seconds for which weights are saved with `ttl_seconds`."""
MAX_METADATA_BYTES = 1 << 16
"""Maximum size of a `user_metadata`, which stays in memory, as JSON."""
GRADIENT_TOLERANCE = 1e-3
"""Largest relative difference between the gradient norms of a step and of its repetition after a start."""
MIN_KEY = 24
"""Minimum length of a client's key."""
WEIGHTS, SAMPLER_WEIGHTS = "weights", "sampler_weights"
"""Kinds of saved weights, as they stand in `tinker://` paths: with optimizer state, or to sample from."""


@dataclass(slots=True, kw_only=True)
class BaseModel:
    """A served base model."""

    name: str
    policy: str
    """Policy of the adapters on it in the journal; its versions have a lineage per client's model."""
    own_policy: str
    """Policy of the base model itself."""
    trainer: AdapterTrainer
    chat_format: ChatFormat
    tokenizer: str
    max_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedWeights:
    """Weights that a client saved under a name."""

    path: str
    """`tinker://MODEL/weights/NAME`, or `…/sampler_weights/NAME`."""
    at: float
    """Wall-clock time of the request."""
    expires: float | None
    weights: WeightsRef | None
    """Published version, if they are to sample from."""
    metadata: dict[str, str] | None

    @property
    def checkpoint_id(self) -> str:
        """The path without the model."""
        return self.path.removeprefix("tinker://").partition("/")[2]


class UnpublishedSteps(msgspec.Struct):
    """What a model trained on since its newest published version: the journal's record of the step between two."""

    rows: int = 0
    tokens: int = 0
    loss: float = 0.0
    grad_norm: float = 0.0
    """Norm of the newest gradient."""
    seconds: float = 0.0
    digest: bytes = b""
    """Digest of the bodies of the passes, in order."""

    def add(self, body: bytes, rows: int, tokens: int, loss: float, seconds: float) -> None:
        """Add a pass."""
        self.rows += rows
        self.tokens += tokens
        self.loss += loss
        self.seconds += seconds
        self.digest = blake2b(self.digest + body, digest_size=16).digest()


@dataclass(slots=True, kw_only=True)
class ClientModel:
    """A client's model."""

    id: str
    owner: str
    base: BaseModel
    number: int
    """Number of the model in the server, from 1: the lineage of its versions."""
    lora: LoraConfig
    seed: int | None
    created_at: float
    metadata: dict[str, Any] | None
    next_sequence: int = 0
    """Sequence number of the next request to be executed; 0 creates the model."""
    waiting: dict[int, str] = field(default_factory=dict)
    """Ids of accepted requests that are not executed, by sequence number."""
    trained_tokens: float = 0.0
    """Tokens by which its turns are counted."""
    used_at: float = 0.0
    steps_since_checkpoint: int = 0
    has_loaded: bool = False
    """Whether weights were loaded since the newest checkpoint. Their files may be gone before they are needed again."""
    has_gradient: bool = False
    unpublished: UnpublishedSteps = field(default_factory=lambda: UnpublishedSteps())
    saved: dict[str, SavedWeights] = field(default_factory=dict)
    """Saved weights, by `checkpoint_id`."""
    newest: WeightsRef | None = None
    """Newest version that was published to sample from."""
    newest_step: int = -1
    """Number of changes of the weights at which it was published."""
    failure: str = ""
    """Why the model could not be created."""

    @property
    def is_ready(self) -> bool:
        """Whether its next request is there."""
        return self.next_sequence in self.waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """A client's sampling session."""

    id: str
    owner: str
    base: BaseModel
    model: ClientModel | None
    weights: WeightsRef | None
    path: str | None
    follows: bool
    """Whether each request samples from the model's newest published weights."""


class TinkerService:
    """Executes the requests of clients; `gateway.tinker.TinkerServer` is its HTTP side.

    Args:
        config: configuration of the server.
        plan: configuration of its run, with all settings chosen.
        directory: the run directory.
        store: the journal.
        bases: base models, by the name that clients use.
        engine: the engine of all base models.
        clock: times and labels.
        tell: receives lines for the user.
    """

    def __init__(
        self,
        config: ServerConfig,
        plan: RunConfig,
        directory: RunDirectory,
        store: SqliteJournal,
        bases: Mapping[str, BaseModel],
        engine: Engine,
        clock: Clock,
        tell: Callable[[str], None],
    ) -> None:
        self._config = config
        self._plan = plan
        self._directory = directory
        self._store = store
        self._log: RequestLog = store.request_log()
        self.bases = bases
        self._engine = engine
        self._clock = clock
        self._tell = tell
        waiting = {request.id for request in self._log.unfinished()}
        self._sampler = ClientSampler(engine, store, clock, config.seed, recorded_samples(store, waiting))
        self._sessions: dict[str, str] = {}
        """Owner of each session."""
        self.models: dict[str, ClientModel] = {}
        self._samplers: dict[str, Sampler] = {}
        self._receiving: dict[str, ClientRequest] = {}
        """Accepted requests that may not be on disk yet, by id."""
        self._done: dict[str, asyncio.Event] = {}
        """Set when a request has its result, by id; only those that are not finished."""
        self._sampling: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(MAX_SAMPLING))
        """Bounds the requests for samples in memory, by owner."""
        self._owner_samples: dict[str, int] = {}
        """Number of unfinished requests for samples, by owner."""
        self._ready = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="agentrl-trainer")
        self._tasks: set[asyncio.Task[None]] = set()
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Receives the error with which the server cannot continue."""

    # --- start and end ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Take over what an earlier process accepted, and begin to execute.

        Raises:
            JournalError: a record is damaged.
            ConfigError: a recorded model needs a base model that is not served.
        """
        for request in self._log.requests(*_CREATES):
            self._admit_model(request)
        for request, result in self._log.finished(*_RECORDED):
            if result.kind != "error":
                self._fold(request, json.loads(result.body))
        self._remove_unrecorded_versions()
        for model in self.models.values():
            self._remove_old_versions(model)  # only now are all names known
            model.next_sequence = self._log.finished_through(model.id) + 1
            created = self._log.result(f"{model.id}:0")
            if created is not None and created.kind == "error":
                model.failure = json.loads(created.body)["error"]
        for request in self._log.unfinished():
            self._enqueue(request)
        self._spawn(self._train())

    async def close(self) -> None:
        """Stop executing; the journal holds what is unfinished."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._log.close()

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.failure.done():
            self.failure.set_exception(error)

    def _fold(self, request: ClientRequest, result: Mapping[str, Any]) -> None:
        """Apply what a finished request did to the server's tables."""
        match request.route:
            case "create_session":
                self._sessions[result["session_id"]] = request.owner
            case "create_sampling_session":
                content = messages.read_json(json.loads(request.body), messages.CreateSampler)
                self._add_sampler(request.owner, result["sampling_session_id"], content)
            case "save_weights":
                self._add_saved(request, messages.read_request(request.route, request.body), result, None)
            case "save_weights_for_sampler":
                content = messages.read_request(request.route, request.body)
                self._add_published(request, content, result, self._published(result["agentrl_version"]))
            case "delete_checkpoint":
                model, name = request.subject, json.loads(request.body)["checkpoint"]
                self.models[model].saved.pop(name, None)

    def _published(self, version: Sequence[Any]) -> WeightsRef:
        weights = self._store.published(PolicyVersion(*version))
        if weights is None:
            raise JournalError(f"the journal names version {version}, which was never published; it was altered")
        return weights

    def _remove_unrecorded_versions(self) -> None:
        """Remove versions whose request has no result: it is executed again, and publishes them again."""
        for base in self.bases.values():
            for directory in (self._directory.versions / base.policy).glob("*.*"):
                lineage, _, step = directory.name.partition(".")
                if not (lineage.isdecimal() and step.isdecimal()):
                    continue
                if self._store.published(PolicyVersion(base.policy, int(lineage), int(step))) is None:
                    shutil.rmtree(directory)

    # --- accepting ----------------------------------------------------------------------------------------------------

    async def accept(self, owner: str, route: str, request: Any, body: bytes) -> Mapping[str, Any]:
        """Accept a request; see `gateway.tinker.TinkerBackend`."""
        subject, sequence = self._place(owner, route, request)
        request_id = f"{subject}:{sequence}"
        known = self._receiving.get(request_id) or self._log.request(request_id)
        if known is None:
            self._check(owner, request)
            known = ClientRequest(request_id, owner, route, subject, sequence, body)
            if route in _CREATES and sequence == 0:
                self._admit_model(known)
            self._receiving[request_id] = known
            self._done[request_id] = asyncio.Event()
            self._log.receive(known)
            self._spawn(self._begin(known))
        elif known.route != route:
            raise InputError(f"seq_id {sequence} of {subject} was used by a request of {known.route}")
        elif known.body != body:
            raise InputError(f"seq_id {sequence} of {subject} was used by another request of {route}, with other data")
        await self._log.flush()
        promise: dict[str, Any] = {"request_id": request_id}
        if route == "asample":
            promise["sample_sequence_ids"] = [f"{request_id}:{number}" for number in range(request.num_samples)]
        else:
            promise["model_id"] = subject
        return promise

    async def _begin(self, request: ClientRequest) -> None:
        """Let a request be executed once it is on disk, even if its client has left."""
        await self._log.flush()
        del self._receiving[request.id]
        self._enqueue(request)

    def _place(self, owner: str, route: str, request: Any) -> tuple[str, int]:
        """Return what a request acts on, and its sequence number there.

        Raises:
            RequestRefusedError: the owner has no such session, model or sampler.
            InputError: the number is missing.
        """
        if route == "asample":
            return self._sampler_of(owner, request.sampling_session_id).id, _sequence(request.seq_id, least=0)
        if route == "create_model" or (route == "load_weights" and request.model_id is None):
            session = self._session_of(owner, request.session_id or "")
            return f"{session}:train:{_sequence(request.model_seq_id, least=0)}", 0
        return self._model_of(owner, request.model_id).id, _sequence(request.seq_id, least=1)

    def _check(self, owner: str, request: Any) -> None:  # noqa: C901, PLR0912 (one case per request)
        """Refuse what cannot be executed, before it is accepted.

        Raises:
            InputError: the message says what to change.
        """
        _check_labels(request)
        match request:
            case messages.CreateModel():
                self._check_model(request)
            case messages.LoadWeights():
                saved = self._saved_of(owner, request.path, WEIGHTS)
                base = self._saved_model(saved.path).base
                if request.base_model is not None and request.base_model != base.name:
                    raise InputError(f"{request.path} belongs to {base.name}, not to {request.base_model[:100]}")
                _check_adam(request.optimizer_config)
                if request.model_id is not None:
                    model, source = self.models[request.model_id], self._saved_model(saved.path)
                    if (model.base, model.lora) != (source.base, source.lora):
                        raise InputError(f"{request.path} holds an adapter of another base model, rank or layers")
            case messages.ForwardBackwardRequest():
                from agentrl.learn.client_training import check_rows

                base = self.models[request.model_id].base
                limits = {"vocabulary": base.trainer.vocabulary, "max_context": self._plan.engine.max_context}
                check_rows(_rows(request), request.loss_fn, request.settings, **limits)
            case messages.OptimStep():
                _check_step(request.adam_params)
            case messages.SaveWeights():
                _check_name(request.path)
                self._check_unused(self.models[request.model_id], request)
            case messages.SaveForSampler():
                if (request.path is None) == (request.sampling_session_seq_id is None):
                    raise InputError("give either a path or a sampling_session_seq_id")
                if request.path is not None:
                    _check_name(request.path)
                self._check_unused(self.models[request.model_id], request)
                if request.kind not in ("snapshot", "inflight"):
                    raise InputError(f"kind {request.kind[:40]!r} is not served; there are snapshot and inflight")
            case messages.Sample():
                sampler = self._samplers[request.sampling_session_id]
                check_sample(
                    request,
                    max_context=self._engine.capabilities.max_context,
                    vocabulary=sampler.base.trainer.vocabulary,
                )
                if self._owner_samples.get(owner, 0) >= MAX_WAITING:
                    raise RequestRefusedError(f"{MAX_WAITING} requests for samples wait already", "unavailable")
                return
        subject = self.models.get(getattr(request, "model_id", None) or "")
        if subject is not None and len(subject.waiting) >= MAX_WAITING:
            raise RequestRefusedError(f"{MAX_WAITING} requests of {subject.id} wait already", "unavailable")

    def _check_unused(self, model: ClientModel, request: messages.SaveWeights | messages.SaveForSampler) -> None:
        """Refuse to replace saved weights or a sampler that the client did not ask to replace.

        Called again when the request is executed: others may have come before it.
        """
        if isinstance(request, messages.SaveForSampler):
            if request.sampling_session_seq_id is not None and _sampler_id(model, request) in self._samplers:
                raise InputError(f"sampling_session_seq_id {request.sampling_session_seq_id} was used by a sampler")
        elif f"{WEIGHTS}/{request.path}" in model.saved and not request.overwrite:
            raise InputError(f"there are weights {request.path!r} already; choose another name, or overwrite")

    def _check_model(self, request: messages.CreateModel) -> None:
        base = self._base_of(request.base_model)
        _check_adam(request.optimizer_config)
        if request.lora_config is None:
            raise InputError("only adapters are trained here, not all weights: give lora_config")
        if not 1 <= request.lora_config.rank <= base.max_rank:
            raise InputError(
                f"lora_config.rank = {request.lora_config.rank}: adapters of {base.name} may have a rank from 1 to "
                f"{base.max_rank} here (models.{base.name}.max_rank)"
            )
        if request.lora_config.seed is not None and not 0 <= request.lora_config.seed < 1 << 63:
            raise InputError("lora_config.seed: a seed is a number from 0 to 2^63 - 1")
        base.trainer.layers(attention=request.lora_config.train_attn, mlp=request.lora_config.train_mlp)

    def _admit_model(self, request: ClientRequest) -> None:
        """Enter a model whose first request was accepted; its number is its place among all of them."""
        if request.sequence != 0:
            return
        content = messages.read_request(request.route, request.body)
        if isinstance(content, messages.LoadWeights):
            source = self._saved_model(content.path)  # the weights themselves may be gone
            base, lora, seed = source.base, source.lora, source.seed
        else:
            assert content.lora_config is not None
            base, shape = self._base_of(content.base_model), content.lora_config
            layers = base.trainer.layers(attention=shape.train_attn, mlp=shape.train_mlp)
            lora, seed = LoraConfig(rank=shape.rank, target_modules=layers), shape.seed
        self.models[request.subject] = ClientModel(
            id=request.subject,
            owner=request.owner,
            base=base,
            number=len(self.models) + 1,
            lora=lora,
            seed=seed,
            created_at=request.received_at or self._clock.wall(),
            metadata=content.user_metadata,
        )

    def _enqueue(self, request: ClientRequest) -> None:
        """Let an accepted request be executed."""
        self._done.setdefault(request.id, asyncio.Event())
        if request.route == "asample":
            self._owner_samples[request.owner] = self._owner_samples.get(request.owner, 0) + 1
            self._spawn(self._sample(request._replace(body=b"")))
        elif request.subject in self.models and request.route not in _IMMEDIATE:
            model = self.models[request.subject]
            if not model.is_ready and request.sequence == model.next_sequence:
                # A model that was idle gets no credit for it.
                ready = [other.trained_tokens for other in self.models.values() if other.is_ready]
                model.trained_tokens = max(model.trained_tokens, min(ready, default=0.0))
            model.waiting[request.sequence] = request.id
            self._ready.set()

    # --- results ------------------------------------------------------------------------------------------------------

    async def retrieve(self, owner: str, request_id: str, seconds: float) -> RequestResult | None:
        """Return the result of a request; see `gateway.tinker.TinkerBackend`."""
        receiving = self._receiving.get(request_id)
        if owner != (self._log.owner(request_id) if receiving is None else receiving.owner):
            raise RequestRefusedError(f"there is no request {request_id[:100]!r}", "model")
        event = self._done.get(request_id)
        if event is not None:
            try:
                await asyncio.wait_for(event.wait(), seconds)
            except TimeoutError:
                return None
        return self._log.result(request_id)

    async def _finish(self, request: ClientRequest, kind: str, body: bytes) -> None:
        """Record a result, and wake its client once it is on disk."""
        self._log.finish(RequestResult(request.id, kind, body))
        await self._log.flush()
        self._done.pop(request.id, asyncio.Event()).set()

    async def _fail(self, request: ClientRequest, error: Exception) -> None:
        """Record that a request failed; a failure that is not the client's is told to the user, too."""
        is_client = isinstance(error, InputError | NonFiniteError)
        if not is_client:
            self._tell(f"request {request.id} ({request.route}) failed: {format_foreign_error(error)}")
        sentence = str(error) if isinstance(error, AgentRLError) else "the server failed to execute this request"
        content = {"error": sentence, "category": "user" if is_client else "server"}
        await self._finish(request, "error", json.dumps(content).encode())

    # --- samples ------------------------------------------------------------------------------------------------------

    async def _sample(self, request: ClientRequest) -> None:
        """Execute a request for samples, whose body is read when its turn comes."""
        try:
            async with self._sampling[request.owner]:
                await self._execute_sample(request)
        finally:
            self._owner_samples[request.owner] -= 1

    async def _execute_sample(self, request: ClientRequest) -> None:
        sampler = self._samplers[request.subject]
        weights = sampler.weights
        if sampler.follows and sampler.model is not None:
            weights = sampler.model.newest
        source = SamplingSource(
            policy=sampler.base.own_policy if weights is None else sampler.base.policy,
            weights=weights,
            chat_format=sampler.base.chat_format,
            sampler_id=sampler.id,
            model_id="" if sampler.model is None else sampler.model.id,
        )
        try:
            if weights is not None and self._is_removed(weights):
                raise InputError(
                    f"the weights of sampler {sampler.id} were removed: a server keeps the newest "
                    f"{self._config.checkpoint.versions} unnamed samplers of a model (checkpoint.versions)"
                )
            recorded = self._log.request(request.id)
            assert recorded is not None
            content = messages.read_request(request.route, recorded.body)
            body = await self._sampler.sample(request.id, content, source)
        except StorageError:
            raise
        except Exception as error:  # noqa: BLE001 - its client gets the reason
            await self._fail(request, error)
        else:
            await self._finish(request, "protobuf", body)

    def _is_removed(self, weights: WeightsRef) -> bool:
        return not Path(weights.path).is_dir()

    # --- training -----------------------------------------------------------------------------------------------------

    async def _train(self) -> None:
        """Execute the requests of models, the model that trained on the fewest tokens first."""
        while True:
            ready = [model for model in self.models.values() if model.is_ready]
            if not ready:
                self._ready.clear()
                await self._ready.wait()
                continue
            model = min(ready, key=lambda one: (one.trained_tokens, one.number))
            request = self._log.request(model.waiting[model.next_sequence])
            assert request is not None
            await self._execute(model, request)
            del model.waiting[model.next_sequence]
            model.next_sequence += 1

    async def _execute(self, model: ClientModel, request: ClientRequest) -> None:
        loop = asyncio.get_running_loop()
        before = model.trained_tokens
        try:
            if model.failure:
                raise InputError(f"the model {model.id} could not be created: {model.failure}")
            content = messages.read_request(request.route, request.body)
            await self._make_resident(model)
            outcome = await loop.run_in_executor(self._thread, self._apply, model, request, content)
            await self._record(model, request, content, outcome)
        except StorageError:
            raise
        except Exception as error:  # noqa: BLE001 - its client gets the reason
            if request.sequence == 0:
                model.failure = str(error)
            if not isinstance(error, InputError) and request.route in ("optim_step", "load_weights"):
                # It may have changed the weights in part; without it, they are rebuilt from the journal.
                await loop.run_in_executor(self._thread, self._forget, model)
            await self._fail(request, error)
        else:
            await self._finish(request, outcome.kind, outcome.body)
            await loop.run_in_executor(self._thread, self._keep_checkpoint, model, request)
        model.trained_tokens = max(model.trained_tokens, before + 1.0)

    def _apply(self, model: ClientModel, request: ClientRequest, content: Any) -> _Outcome:
        """Execute a request of a model in memory, in the trainer's thread."""
        trainer = model.base.trainer
        match content:
            case messages.CreateModel():
                return _Outcome.of({"type": "create_model", "model_id": model.id})
            case messages.LoadWeights():
                self._load(model, content)
                return _Outcome.of({"type": "load_weights", "path": content.path, "model_id": model.id})
            case messages.ForwardBackwardRequest():
                return self._forward_backward(model, request, content)
            case messages.OptimStep():
                return _Outcome.of({"type": "optim_step", "metrics": {"grad_norm": self._optim_step(model, content)}})
            case messages.SaveWeights():
                self._check_unused(model, content)
                directory = self._saved_directory(model, content.path)
                with _writing(directory) as staging:
                    trainer.save(model.id, staging / "state")
                    shutil.rmtree(directory, ignore_errors=True)  # overwritten, or left by a process that was killed
                    rename_durably(staging, directory)
                path = f"tinker://{model.id}/{WEIGHTS}/{content.path}"
                return _Outcome.of({"type": "save_weights", "path": path})
            case messages.SaveForSampler():
                self._check_unused(model, content)
                weights = self._publish(model)
                result: dict[str, Any] = {
                    "type": "save_weights_for_sampler",
                    "agentrl_version": list(weights.version),
                    "agentrl_step": trainer.step(model.id),
                }
                if content.path is not None:
                    result["path"] = f"tinker://{model.id}/{SAMPLER_WEIGHTS}/{content.path}"
                else:
                    result["sampling_session_id"] = _sampler_id(model, content)
                return _Outcome.of(result, weights)
        raise AssertionError(request.route)

    def _publish(self, model: ClientModel) -> WeightsRef:
        """Publish a model's weights as its next version, unless they are those of its newest."""
        if model.newest is None:
            return model.base.trainer.write_version(model.id, PolicyVersion(model.base.policy, model.number, 0))
        if model.newest_step == model.base.trainer.step(model.id):
            return model.newest
        version = model.newest.version._replace(step=model.newest.version.step + 1)
        return model.base.trainer.write_version(model.id, version)

    def _forward_backward(
        self, model: ClientModel, request: ClientRequest, content: messages.ForwardBackwardRequest
    ) -> _Outcome:
        rows, started = _rows(content), self._clock.monotonic()
        result = model.base.trainer.forward(
            model.id, rows, content.loss_fn, content.settings, backward=not content.forward_only
        )
        tokens = sum(len(row.token_ids) for row in rows)
        model.trained_tokens += tokens
        if not content.forward_only:
            model.has_gradient = True
            seconds = self._clock.monotonic() - started
            model.unpublished.add(request.body, len(rows), tokens, result.loss, seconds)
        body = messages.write_forward_backward(result.logprobs, {"loss:sum": result.loss})
        return _Outcome("protobuf", body)

    def _optim_step(self, model: ClientModel, content: messages.OptimStep) -> float:
        from agentrl.learn.client_training import AdamSettings

        adam = content.adam_params
        norm = model.base.trainer.optim_step(
            model.id,
            AdamSettings(
                learning_rate=adam.learning_rate,
                beta1=adam.beta1,
                beta2=adam.beta2,
                eps=adam.eps,
                weight_decay=adam.weight_decay,
                max_grad_norm=max(0.0, adam.grad_clip_norm),
            ),
        )
        model.has_gradient = False
        model.steps_since_checkpoint += 1
        model.unpublished.grad_norm = norm
        return norm

    def _load(self, model: ClientModel, content: messages.LoadWeights) -> None:
        # They did not have to be in time for this thread, but when the request was accepted.
        saved = self._saved_of(model.owner, content.path, WEIGHTS, expired=True)
        directory = self._saved_directory(self._saved_model(saved.path), saved.path.rpartition("/")[2])
        model.base.trainer.load(model.id, directory / "state", optimizer=content.optimizer)
        model.has_gradient = False
        model.has_loaded = True

    async def _record(self, model: ClientModel, request: ClientRequest, content: Any, outcome: _Outcome) -> None:
        """Enter what a request did in the tables and the control log, whose rows are on disk before its result."""
        match content:
            case messages.SaveWeights():
                self._add_saved(request, content, outcome.content, None)
            case messages.SaveForSampler():
                assert outcome.weights is not None
                if outcome.weights != model.newest:
                    await self._record_version(model, outcome.weights)
                self._add_published(request, content, outcome.content, outcome.weights)
                self._remove_old_versions(model)

    async def _record_version(self, model: ClientModel, weights: WeightsRef) -> None:
        """Record a version, and the step from the one before it, in which the client may have taken several."""
        version, past = weights.version, model.unpublished
        parent = None if model.newest is None else model.newest.version
        step = None
        if parent is not None:
            report = StepReport(
                step_id=version.step,
                policy=version.policy,
                started_from=parent,
                loss=past.loss,
                grad_norm=past.grad_norm,
                samples=past.rows,
                tokens=past.tokens,
                seconds=past.seconds,
                metrics={},
                input_digest=past.digest.hex(),
            )
            batch = TrainBatch(step_id=version.step, policy=version.policy, units=(), normalizer=1.0)
            step = StepRow(report=report, version=version, batch=batch)
        await record_published_version(self._store, weights, parent, step)
        model.unpublished = UnpublishedSteps()

    def _keep_checkpoint(self, model: ClientModel, request: ClientRequest) -> None:
        """Write a checkpoint if one is due: right after a step, when there is no gradient to keep."""
        every = self._config.checkpoint.every
        is_due = model.has_loaded or (every and model.steps_since_checkpoint >= every)
        if model.has_gradient or not is_due:
            return
        directory = self._checkpoints(model) / str(request.sequence)
        with _writing(directory) as staging:
            model.base.trainer.save(model.id, staging / "state")
            (staging / "unpublished.json").write_bytes(msgspec.json.encode(model.unpublished))
            rename_durably(staging, directory)
        model.steps_since_checkpoint, model.has_loaded = 0, False
        for older in self._checkpoints(model).iterdir():
            if older.name.isdecimal() and int(older.name) < request.sequence:
                shutil.rmtree(older)

    # --- models in memory ---------------------------------------------------------------------------------------------

    async def _make_resident(self, model: ClientModel) -> None:
        """Read a model into memory if it is not there; others leave if there are too many."""
        model.used_at = self._clock.monotonic()
        if model.base.trainer.has(model.id):
            return
        loop = asyncio.get_running_loop()
        resident = [other for other in self.models.values() if other.base.trainer.has(other.id)]
        excess = max(0, len(resident) + 1 - self._config.max_models)
        for other in sorted(resident, key=lambda one: one.used_at)[:excess]:
            await loop.run_in_executor(self._thread, other.base.trainer.remove, other.id)
        await loop.run_in_executor(self._thread, self._restore, model)

    def _forget(self, model: ClientModel) -> None:
        """Remove a model from memory, if it is there; its next request rebuilds it."""
        if model.base.trainer.has(model.id):
            model.base.trainer.remove(model.id)

    def _restore(self, model: ClientModel) -> None:
        """Rebuild a model: its newest checkpoint, and the finished requests since then, executed again.

        Raises:
            TrainerError: a repeated step has another gradient than it had. The model is not in memory then.
        """
        try:
            self._rebuild(model)
        except BaseException:
            self._forget(model)  # a model that is rebuilt in part must not serve the next request
            raise

    def _rebuild(self, model: ClientModel) -> None:
        trainer = model.base.trainer
        trainer.add(model.id, model.lora, model.seed)
        model.has_gradient = False
        model.unpublished = UnpublishedSteps()
        written = [int(place.name) for place in self._checkpoints(model).glob("*") if place.name.isdecimal()]
        sequence = max(written, default=-1)
        if sequence >= 0:
            checkpoint = self._checkpoints(model) / str(sequence)
            trainer.restore(model.id, checkpoint / "state")
            unpublished = (checkpoint / "unpublished.json").read_bytes()
            model.unpublished = msgspec.json.decode(unpublished, type=UnpublishedSteps)
        model.steps_since_checkpoint, model.has_loaded = 0, False
        turns = model.trained_tokens
        for request in self._repeated(model, sequence):
            content = messages.read_request(request.route, request.body)
            if isinstance(content, messages.SaveForSampler):
                model.unpublished = UnpublishedSteps()
                continue
            outcome = self._apply(model, request, content)
            if isinstance(content, messages.OptimStep):
                self._check_repetition(model, request, outcome)
        model.trained_tokens = turns

    def _repeated(self, model: ClientModel, after: int) -> Iterator[ClientRequest]:
        """Yield the finished requests after a sequence number that changed or published the weights or the gradient."""
        for request in self._log.of_subject(model.id, after):
            if request.sequence >= model.next_sequence:
                return
            result = self._log.result(request.id)
            changes = request.route in ("forward_backward", "optim_step", "load_weights", "save_weights_for_sampler")
            if changes and result is not None and result.kind != "error":
                yield request

    def _check_repetition(self, model: ClientModel, request: ClientRequest, outcome: _Outcome) -> None:
        result = self._log.result(request.id)
        assert result is not None
        before, now = json.loads(result.body)["metrics"]["grad_norm"], outcome.content["metrics"]["grad_norm"]
        if not math.isclose(before, now, rel_tol=GRADIENT_TOLERANCE, abs_tol=1e-12):
            raise TrainerError(
                f"{model.id}: the step of request {request.sequence} had a gradient norm of {before:.6g}, and "
                f"{now:.6g} when it was repeated from the journal; the model's base or the code has changed since"
            )

    def _checkpoints(self, model: ClientModel) -> Path:
        return self._directory.checkpoints / "models" / str(model.number)

    def _saved_directory(self, model: ClientModel, name: str) -> Path:
        return self._directory.checkpoints / "saved" / str(model.number) / name

    # --- tables -------------------------------------------------------------------------------------------------------

    def _add_saved(
        self, request: ClientRequest, content: Any, result: Mapping[str, Any], weights: WeightsRef | None
    ) -> None:
        """Enter weights that were saved under a name."""
        at = request.received_at
        saved = SavedWeights(
            path=result["path"],
            at=at,
            expires=None if content.ttl_seconds is None else at + content.ttl_seconds,
            weights=weights,
            metadata=content.user_metadata,
        )
        self.models[request.subject].saved[saved.checkpoint_id] = saved

    def _add_published(
        self, request: ClientRequest, content: messages.SaveForSampler, result: Mapping[str, Any], weights: WeightsRef
    ) -> None:
        """Enter a published version, under its name or as a sampling session."""
        model = self.models[request.subject]
        model.newest, model.newest_step = weights, result["agentrl_step"]
        if content.path is not None:
            self._add_saved(request, content, result, weights)
        else:
            sampler_id = result["sampling_session_id"]
            follows = content.kind == "inflight"
            self._samplers[sampler_id] = Sampler(
                id=sampler_id,
                owner=model.owner,
                base=model.base,
                model=model,
                weights=weights,
                path=None,
                follows=follows,
            )

    def _remove_old_versions(self, model: ClientModel) -> None:
        """Remove versions that no name keeps, except the newest."""
        keep = self._config.checkpoint.versions
        named = {saved.weights.version for saved in model.saved.values() if saved.weights is not None}
        folder = self._directory.versions / model.base.policy
        steps = sorted(int(place.name.partition(".")[2]) for place in folder.glob(f"{model.number}.*"))
        for step in steps[: -keep or None] if keep else ():
            version = PolicyVersion(model.base.policy, model.number, step)
            if version not in named and not self._sampler.pinned.is_used(version):
                shutil.rmtree(folder / f"{model.number}.{step}", ignore_errors=True)

    def _add_sampler(self, owner: str, sampler_id: str, content: messages.CreateSampler) -> None:
        if content.model_path is None:
            base, model, weights = self._base_of(content.base_model or ""), None, None
        else:
            saved = self._saved_of(owner, content.model_path, SAMPLER_WEIGHTS, expired=True)
            model = self._saved_model(saved.path)
            base, weights = model.base, saved.weights
        self._samplers[sampler_id] = Sampler(
            id=sampler_id, owner=owner, base=base, model=model, weights=weights, path=content.model_path, follows=False
        )

    # --- looking up ---------------------------------------------------------------------------------------------------

    def _base_of(self, name: str) -> BaseModel:
        base = self.bases.get(name)
        if base is None:
            raise InputError(f"the base model {name[:100]!r} is not served here; there are: {', '.join(self.bases)}")
        return base

    def _session_of(self, owner: str, session_id: str) -> str:
        if self._sessions.get(session_id) != owner:
            raise RequestRefusedError(f"there is no session {session_id[:100]!r}", "model")
        return session_id

    def _model_of(self, owner: str, model_id: str) -> ClientModel:
        model = self.models.get(model_id)
        if model is None or model.owner != owner:
            raise RequestRefusedError(f"there is no model {model_id[:100]!r}", "model")
        return model

    def _models_of(self, owner: str) -> list[ClientModel]:
        return [model for model in self.models.values() if model.owner == owner]

    def _sampler_of(self, owner: str, sampler_id: str) -> Sampler:
        sampler = self._samplers.get(sampler_id)
        if sampler is None or sampler.owner != owner:
            raise RequestRefusedError(f"there is no sampler {sampler_id[:100]!r}", "model")
        return sampler

    def _saved_model(self, path: str) -> ClientModel:
        return self.models[path.removeprefix("tinker://").partition("/")[0]]

    def _saved_of(self, owner: str, path: str, kind: str, *, expired: bool = False) -> SavedWeights:
        """Return saved weights of an owner by their path; those that expired only on request.

        Raises:
            InputError: there are none.
        """
        model_id, _, checkpoint = path.removeprefix("tinker://").partition("/")
        model = self.models.get(model_id)
        if not path.startswith("tinker://") or model is None or model.owner != owner:
            raise InputError(f"there are no weights {path[:200]!r}")
        if not checkpoint.startswith(f"{kind}/"):
            raise InputError(f"{path[:200]}: weights for this request are tinker://MODEL/{kind}/NAME")
        if not expired:
            self._remove_expired(model)
        saved = model.saved.get(checkpoint)
        if saved is None:
            raise InputError(f"there are no weights {path[:200]!r}; they may have expired")
        return saved

    def _remove_expired(self, model: ClientModel) -> None:
        now = self._clock.wall()
        for saved in [one for one in model.saved.values() if one.expires is not None and one.expires < now]:
            self._remove_saved(model, saved)

    def _remove_saved(self, model: ClientModel, saved: SavedWeights) -> None:
        del model.saved[saved.checkpoint_id]
        if saved.weights is None:
            shutil.rmtree(self._saved_directory(model, saved.path.rpartition("/")[2]), ignore_errors=True)
        else:
            self._remove_old_versions(model)

    # --- answers ------------------------------------------------------------------------------------------------------

    async def answer(self, owner: str, question: str, request: Any) -> Mapping[str, Any]:  # noqa: C901 (one case each)
        """Answer a request that needs no wait; see `gateway.tinker.TinkerBackend`."""
        match question:
            case "create_session":
                session_id = secrets.token_hex(16)
                result = {"type": "create_session", "session_id": session_id}
                return await self._record_answer(owner, question, session_id, 0, {}, result)
            case "session_heartbeat":
                self._session_of(owner, request.session_id)
                return {"type": "session_heartbeat"}
            case "create_sampling_session":
                return await self._create_sampler(owner, request)
            case "get_info":
                return self._info(self._model_of(owner, request.model_id))
            case "weights_info":
                return self._weights_info(owner, request.tinker_path)
            case "capabilities":
                return {"supported_models": [self._capabilities(base) for base in self.bases.values()]}
            case "sampler":
                sampler = self._sampler_of(owner, request["sampler_id"])
                return {"sampler_id": sampler.id, "base_model": sampler.base.name, "model_path": sampler.path}
            case "models":
                return _page("training_runs", [self._describe(model) for model in self._models_of(owner)])
            case "model":
                return self._describe(self._model_of(owner, request["model_id"]))
            case "checkpoints":
                return {"checkpoints": self._checkpoint_list(self._model_of(owner, request["model_id"]))}
            case "all_checkpoints":
                lists = [self._checkpoint_list(model) for model in self._models_of(owner)]
                return _page("checkpoints", [one for checkpoints in lists for one in checkpoints])
            case "delete_checkpoint":
                return await self._delete(owner, request["model_id"], request["checkpoint"])
        raise AssertionError(question)

    async def _record_answer(
        self, owner: str, route: str, subject: str, sequence: int, content: Any, result: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Record a request with its result, apply it, and return the result once both are on disk."""
        request = ClientRequest(
            f"{route}:{subject}:{sequence}", owner, route, subject, sequence, json.dumps(content).encode()
        )
        self._fold(request, result)
        self._log.record(request, RequestResult(request.id, "json", json.dumps(result).encode()))
        await self._log.flush()
        return result

    async def _create_sampler(self, owner: str, request: messages.CreateSampler) -> Mapping[str, Any]:
        session = self._session_of(owner, request.session_id)
        sampler_id = f"{session}:sample:{_sequence(request.sampling_session_seq_id, least=0)}"
        result = {"type": "create_sampling_session", "sampling_session_id": sampler_id}
        if (known := self._samplers.get(sampler_id)) is not None:
            if (known.base.name if request.base_model else None, known.path) != (
                request.base_model,
                request.model_path,
            ):
                raise InputError(
                    f"sampling_session_seq_id {request.sampling_session_seq_id} was used by another sampler"
                )
            await self._log.flush()
            return result  # the SDK repeats a request whose answer it did not get
        if request.model_path is not None:
            self._saved_of(owner, request.model_path, SAMPLER_WEIGHTS)
        elif request.base_model is None:
            raise InputError("create_sampling_session needs base_model or model_path")
        else:
            self._base_of(request.base_model)
        content = {name: getattr(request, name) for name in request.__struct_fields__}
        sequence = request.sampling_session_seq_id
        return await self._record_answer(owner, "create_sampling_session", session, sequence, content, result)

    async def _delete(self, owner: str, model_id: str, checkpoint: str) -> Mapping[str, Any]:
        model = self._model_of(owner, model_id)
        saved = model.saved.get(checkpoint)
        if saved is None:
            raise RequestRefusedError(f"there are no weights {checkpoint[:100]!r} of {model_id}", "model")
        content = {"checkpoint": checkpoint}
        await self._record_answer(owner, "delete_checkpoint", model_id, int(self._clock.wall() * 1e6), content, {})
        model.saved[checkpoint] = saved
        self._remove_saved(model, saved)
        return {}

    def archive(self, owner: str, model_id: str, checkpoint: str) -> Path:
        """Return the directory of saved weights; see `gateway.tinker.TinkerBackend`."""
        saved = self._saved_of(owner, f"tinker://{model_id}/{checkpoint}", SAMPLER_WEIGHTS)
        assert saved.weights is not None
        return Path(saved.weights.path)

    def _capabilities(self, base: BaseModel) -> dict[str, Any]:
        context = self._engine.capabilities.max_context
        return {"model_name": base.name, "max_context_length": context, "trainable": True, "sampleable": True}

    def _info(self, model: ClientModel) -> dict[str, Any]:
        data = {"arch": "agentrl", "model_name": model.base.name, "tokenizer_id": model.base.tokenizer}
        return {
            "type": "get_info",
            "model_id": model.id,
            "model_data": data,
            "is_lora": True,
            "lora_rank": model.lora.rank,
            "model_name": model.base.name,
        }

    def _weights_info(self, owner: str, path: str) -> dict[str, Any]:
        kind = SAMPLER_WEIGHTS if f"/{SAMPLER_WEIGHTS}/" in path else WEIGHTS
        model = self._saved_model(self._saved_of(owner, path, kind).path)
        return {"base_model": model.base.name, "is_lora": True, "lora_rank": model.lora.rank}

    def _describe(self, model: ClientModel) -> dict[str, Any]:
        checkpoints = self._checkpoint_list(model)
        newest = {one["checkpoint_type"]: one for one in checkpoints}
        return {
            "training_run_id": model.id,
            "base_model": model.base.name,
            "model_owner": model.owner,
            "is_lora": True,
            "lora_rank": model.lora.rank,
            "corrupted": bool(model.failure),
            "last_request_time": _time(model.created_at),
            "last_checkpoint": newest.get("training"),
            "last_sampler_checkpoint": newest.get("sampler"),
            "user_metadata": model.metadata,
        }

    def _checkpoint_list(self, model: ClientModel) -> list[dict[str, Any]]:
        self._remove_expired(model)
        return [
            {
                "checkpoint_id": saved.checkpoint_id,
                "checkpoint_type": "training" if saved.weights is None else "sampler",
                "time": _time(saved.at),
                "tinker_path": saved.path,
                "user_metadata": saved.metadata,
                "expires_at": None if saved.expires is None else _time(saved.expires),
            }
            for saved in model.saved.values()
        ]


class _Outcome(NamedTuple):
    """What a request did: the encoded result, and the version that it published."""

    kind: str
    body: bytes
    weights: WeightsRef | None = None

    @staticmethod
    def of(content: Mapping[str, Any], weights: WeightsRef | None = None) -> _Outcome:
        """Make an outcome of JSON data."""
        return _Outcome("json", json.dumps(content).encode(), weights)

    @property
    def content(self) -> Any:
        """The JSON data."""
        return json.loads(self.body)


_CREATES = ("create_model", "load_weights")
"""Routes whose request with sequence number 0 creates a model."""
_IMMEDIATE = ("create_session", "create_sampling_session", "delete_checkpoint")
"""Routes whose requests are recorded with their results."""
_RECORDED = (*_IMMEDIATE, *_CREATES, "save_weights", "save_weights_for_sampler")
"""Routes that change the server's tables."""


@contextlib.contextmanager
def _writing(directory: Path) -> Iterator[Path]:
    """Yield a staging directory for saved weights.

    Raises:
        StorageError: writing failed.
    """
    from agentrl.learn.storage import converting_write_errors

    with converting_write_errors(directory), staging_directory(directory, depth=3) as staging:
        yield staging


def recorded_samples(store: SqliteJournal, requests: Set[str]) -> dict[str, list[str]]:
    """Return the recorded episodes of requests for samples, in order, by request.

    A process that was killed between the commit of a request's episodes and that of its result leaves them.
    """
    recorded: dict[str, list[str]] = {}
    if not requests:
        return recorded
    for task, episode in store.rows("SELECT task, episode FROM episodes ORDER BY length(episode), episode"):
        if task in requests:
            recorded.setdefault(task, []).append(episode)
    return recorded


def _sampler_id(model: ClientModel, request: messages.SaveForSampler) -> str:
    number = _sequence(request.sampling_session_seq_id, least=0)
    return f"{model.id.rpartition(':train:')[0]}:sample:{number}"


def _check_labels(request: Any) -> None:
    """Refuse a time to live or data about a model that are out of range.

    Raises:
        InputError: the message names it.
    """
    seconds, metadata = getattr(request, "ttl_seconds", None), getattr(request, "user_metadata", None)
    if seconds is not None and not 1 <= seconds <= MAX_TTL_S:
        raise InputError(f"ttl_seconds: from 1 to {MAX_TTL_S} are possible")
    if metadata is not None and len(json.dumps(metadata)) > MAX_METADATA_BYTES:
        raise InputError(f"user_metadata: more than {MAX_METADATA_BYTES} bytes")


def _sequence(number: int | None, *, least: int) -> int:
    if number is None or not least <= number < 1 << 53:
        raise InputError(f"the sequence number {number} is missing or out of range; it is at least {least}")
    return number


def _page(name: str, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a list of everything in the protocol's form of a page."""
    return {name: items, "cursor": {"offset": 0, "limit": len(items), "total_count": len(items)}}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _rows(request: messages.ForwardBackwardRequest) -> list[ClientRow]:
    """Return the rows of a request as the trainer takes them.

    Raises:
        InputError: one has no targets, or targets that are no integers.
    """
    import numpy as np

    from agentrl.learn.client_training import ClientRow

    rows = []
    for number, datum in enumerate(request.data):
        targets = datum.inputs.get("target_tokens")
        if targets is None or targets.dtype.kind != "i":
            raise InputError(f"datum {number}: target_tokens are missing, or no integers")
        columns = {name: column.astype(np.float32) for name, column in datum.inputs.items() if name != "target_tokens"}
        rows.append(ClientRow(token_ids=datum.token_ids, targets=targets.astype(np.int64), columns=columns))
    return rows


def _check_adam(optimizer: messages.Optimizer | None) -> None:
    if optimizer is not None and optimizer.type != "adamw":
        raise InputError(f"the optimizer {optimizer.type[:40]!r} is not served here; there is adamw")


def _check_name(name: str) -> None:
    if not is_safe_name(name):
        raise InputError(f"{name[:80]!r} becomes part of a path: up to 64 letters, digits, '.', '_' and '-'")


def _check_step(adam: messages.Adam) -> None:
    """Refuse settings with which AdamW cannot step.

    Raises:
        InputError: the message names the setting.
    """
    ranges = {
        "learning_rate": adam.learning_rate >= 0,
        "beta1": 0 <= adam.beta1 < 1,
        "beta2": 0 <= adam.beta2 < 1,
        "eps": adam.eps >= 0,
        "weight_decay": adam.weight_decay >= 0,
    }
    for name, is_valid in ranges.items():
        if not is_valid:
            raise InputError(f"adam_params.{name} = {getattr(adam, name)} is out of range")


def read_keys(config: ServerConfig) -> dict[str, str]:
    """Return the owner of each key, from the environment.

    Raises:
        ConfigError: a variable is not set, or two hold one key.
    """
    owners: dict[str, str] = {}
    for variable in config.keys:
        key = os.environ.get(variable, "")
        if not key.startswith("tml-") or len(key) < MIN_KEY:
            raise ConfigError(
                f"keys: the environment variable {variable} holds no key of a client: set it to `tml-` and at least "
                f"{MIN_KEY - 4} random characters, such as {variable}=tml-$(openssl rand -hex 16), here and for the "
                "client"
            )
        if key in owners:
            raise ConfigError(f"keys: {owners[key]} and {variable} hold the same key; give each owner one")
        owners[key] = variable
    return owners


@contextlib.asynccontextmanager
async def open_service(config: ServerConfig, tell: Callable[[str], None]) -> AsyncIterator[TinkerService]:
    """Open the run directory of a server, load its models, and execute requests until the context is left.

    Raises:
        InputError: a model or a setting cannot be used.
        JournalError: a record of an earlier process is damaged.
    """
    from agentrl.journal.run_process import record_process_state, recording_process_state
    from agentrl.journal.store import SqliteJournal

    check_local_models(config.run)
    path, clock = Path(config.directory) / config.name, SystemClock()
    plan, line = await asyncio.to_thread(with_chosen_settings, config.run, RunDirectory.config(path))
    if line:
        tell(line)
    is_new = not (path / "journal").is_dir()
    directory = RunDirectory.create(path, plan.model_dump_json(indent=1)) if is_new else RunDirectory.reopen(path)
    info = {"name": config.name, "config": plan.model_dump(mode="json"), "code": {}}
    async with contextlib.AsyncExitStack() as stack:
        store = SqliteJournal(directory.journal, info=info)
        stack.push_async_callback(store.close)
        stack.enter_context(recording_process_state(directory.path))
        bases = await asyncio.to_thread(_load_bases, config, plan, directory)
        versions = {policy: PolicyVersion(policy, 0, 0) for policy in plan.policies}
        engine = await make_engine(plan.engine_plan, versions, tell, directory.engine_log)
        stack.push_async_callback(engine.close)
        service = TinkerService(config, plan, directory, store, bases, engine, clock, tell)
        stack.push_async_callback(service.close)
        await service.start()
        yield service
        record_process_state(directory.path, "stopped")


def _load_bases(config: ServerConfig, plan: RunConfig, directory: RunDirectory) -> dict[str, BaseModel]:
    """Load the base models for training, with their tokenizers."""
    from agentrl.learn.client_training import AdapterTrainer
    from agentrl.learn.ranks import rank_device

    device = rank_device(0, stays_on_cpu=plan.stays_on_cpu)
    return {
        name: BaseModel(
            name=name,
            policy=config.policies_of(name)[0],
            own_policy=config.policies_of(name)[1],
            trainer=AdapterTrainer(plan.trainer_plan, Path(model.path), directory.path, device),
            chat_format=make_chat_format(ModelConfig(path=model.path)),
            tokenizer=model.tokenizer or os.path.abspath(model.path),
            max_rank=model.max_rank,
        )
        for name, model in config.models.items()
    }
