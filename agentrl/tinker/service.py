"""A server for clients of the Tinker protocol: their models, in the order of their requests, over the journal.

A client's model is an adapter on a base model, or trains all its weights. Its requests are executed by their sequence
numbers in one thread; owners take turns, and so do the models of each, by the tokens that they trained on
(`shares.py`). The journal decides everything: a request is in it before the client knows its id, and a result before
the client can see it. What is in memory follows from it: `tables.py` holds what clients have, `model_training.py` their
models, `samples.py` samples, and `checks.py` refuses bad requests.

Invariants: an acknowledged step is part of every later version, once; what another owner has does not exist; a result
never changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import secrets
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from agentrl.app.engines import make_engine
from agentrl.app.hub import check_local_models
from agentrl.app.model_files import check_models_unchanged, decode_models, record_models
from agentrl.app.plan import with_chosen_settings
from agentrl.core.clock import Clock, SystemClock
from agentrl.core.errors import (
    AgentRLError,
    ConfigError,
    InputError,
    NonFiniteError,
    StorageError,
    format_foreign_error,
)
from agentrl.core.records import PolicyVersion, WeightsRef
from agentrl.gateway.calls import RequestRefusedError
from agentrl.journal.requests import REQUESTS_FILE, ClientRequest, RequestLog, RequestResult
from agentrl.observe.run_directory import RunDirectory
from agentrl.tinker import messages
from agentrl.tinker.answers import checkpoint_list, describe_model, describe_session, model_info, page, weights_info
from agentrl.tinker.checks import check_labels, check_request
from agentrl.tinker.config import ServerConfig
from agentrl.tinker.model_training import ModelTraining
from agentrl.tinker.samples import ClientSampler, SamplingSource, recorded_samples
from agentrl.tinker.shares import TrainingTurns
from agentrl.tinker.tables import (
    CREATES,
    EXTERNAL_WEIGHTS,
    IMMEDIATE,
    RECORDED,
    SAMPLER_WEIGHTS,
    SAVES,
    BaseModel,
    ClientModel,
    ClientTables,
    sequence_number,
)

if TYPE_CHECKING:
    from agentrl.config.run import RunConfig
    from agentrl.core.ports import Engine
    from agentrl.journal.store import SqliteJournal

REFUSED = "refused"
"""Route of the record that a refused request used its sequence number up; its body is the reason."""
MAX_WAITING = 4096
"""Maximum number of accepted requests of one owner's models, and of its requests for samples, that are not finished."""
MAX_SAMPLING = 256
"""Maximum number of requests for samples of one owner that are executed at once; others wait on disk."""
MIN_KEY = 24
"""Minimum length of a client's key."""


class TinkerService:
    """Executes the requests of clients. Refusals are `InputError` or `RequestRefusedError`.

    Args:
        config: configuration of the server.
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
        directory: RunDirectory,
        store: SqliteJournal,
        bases: Mapping[str, BaseModel],
        engine: Engine,
        clock: Clock,
        tell: Callable[[str], None],
    ) -> None:
        self._log: RequestLog = store.request_log()
        self._engine = engine
        self._clock = clock
        self._tell = tell
        waiting = {request.id for request in self._log.unfinished()}
        recorded = recorded_samples(store, waiting)
        self._sampler = ClientSampler(engine, store, clock, config.seed, recorded, config.keys)
        is_used = self._sampler.pinned.is_used
        self.tables = ClientTables(bases, store, directory, clock, config.checkpoint.versions, is_used)
        self._training = ModelTraining(
            self.tables,
            self._log,
            store,
            directory,
            clock,
            max_models=config.max_models,
            checkpoint_every=config.checkpoint.every,
        )
        self._receiving: dict[str, ClientRequest] = {}
        """Accepted requests that may not be on disk yet, by id."""
        self._done: dict[str, asyncio.Event] = {}
        """Set when a request has its result, by id; only those that are not finished."""
        self._sampling: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(MAX_SAMPLING))
        """Bounds the requests for samples in memory, by owner."""
        self._samples: dict[str, asyncio.Task[None]] = {}
        """Requests for samples that can be cancelled, by id."""
        self._unfinished: Counter[tuple[str, bool]] = Counter()
        """Number of unfinished requests, by owner and whether they are for samples."""
        self._turns = TrainingTurns(self._training.turn)
        self._ready = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Receives the error with which the server cannot continue."""

    # --- start and end ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Take over what an earlier process accepted, and begin to execute.

        Raises:
            JournalError: a record is damaged.
            InputError: a recorded model needs a base model that is not served.
        """
        for request in self._log.requests(*CREATES):
            self.tables.admit_model(request)
        for request, result in self._log.finished(*RECORDED):
            if result.kind != "error":
                self.tables.fold(request, json.loads(result.body))
        self.tables.remove_leftovers()
        self.tables.remove_expired(*self.tables.models.values())
        for model in self.tables.models.values():
            self.tables.remove_old_versions(model)  # only now are all names known
            model.next_sequence = self._log.finished_through(model.id) + 1
            created = self._log.result(f"{model.id}:0")
            if created is not None and created.kind == "error":
                model.failure = json.loads(created.body)["error"]
        for request in self._log.unfinished():
            self._unfinished[request.owner, request.route == "asample"] += 1
            self._enqueue(request)
        self._spawn(self._train())

    async def close(self) -> None:
        """Stop executing; the journal holds what is unfinished."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._training.close()
        self._log.close()

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.failure.done():
            self.failure.set_exception(error)

    # --- accepting ----------------------------------------------------------------------------------------------------

    async def accept(self, owner: str, route: str, request: Any, body: bytes) -> Mapping[str, Any]:
        """Accept a request of `messages.FUTURES`; return its id and other data of the promise.

        Once this returns, the request survives any crash.
        """
        subject, sequence = self._place(owner, route, request)
        request_id = f"{subject}:{sequence}"
        known = self._receiving.get(request_id) or self._log.request(request_id)
        if known is None or known.route == REFUSED:
            try:
                check_request(self.tables, owner, request, max_context=self._engine.capabilities.max_context)
            except InputError as error:
                await self.refuse(owner, subject, sequence, str(error))
                raise
            if known is not None:
                raise InputError(f"seq_id {sequence} of {subject} was used by a refused request: {known.body.decode()}")
            known = ClientRequest(request_id, owner, route, subject, sequence, body)
            self._check_room(known)
            if route in CREATES and sequence == 0:
                self.tables.admit_model(known)
            self._receive(known)
        elif known.route != route:
            raise InputError(f"seq_id {sequence} of {subject} was used by a request of {known.route}")
        elif known.body != body and not _repeats(request, known):
            raise InputError(f"seq_id {sequence} of {subject} was used by another request of {route}, with other data")
        await self._log.flush()
        promise: dict[str, Any] = {"request_id": request_id}
        if route == "asample":
            promise["sample_sequence_ids"] = [f"{request_id}:{number}" for number in range(request.num_samples)]
        else:
            promise["model_id"] = subject
        return promise

    async def refuse(self, owner: str, model_id: str, sequence: int, reason: str) -> None:
        """Use up the sequence number of a refused request: its client's next ones have the numbers after it.

        The reason is queued like a request, and fails with it in its turn.
        """
        model, request_id = self.tables.models.get(model_id), f"{model_id}:{sequence}"
        if model is None or model.owner != owner or not max(1, model.next_sequence) <= sequence < 1 << 63:
            return
        if request_id not in self._receiving and self._log.request(request_id) is None:
            refused = ClientRequest(request_id, owner, REFUSED, model_id, sequence, reason.encode(errors="replace"))
            self._check_room(refused)
            self._receive(refused)
            await self._log.flush()

    def _receive(self, request: ClientRequest) -> None:
        """Queue an accepted request for the disk, and let it be executed once it is there."""
        self._receiving[request.id] = request
        self._unfinished[request.owner, request.route == "asample"] += 1
        self._done[request.id] = asyncio.Event()
        self._log.receive(request)
        self._spawn(self._begin(request))

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
            return self.tables.sampler_of(owner, request.sampling_session_id).id, sequence_number(
                request.seq_id, least=0
            )
        if route == "create_model" or (route == "load_weights" and request.model_id is None):
            session = self.tables.session_of(owner, request.session_id or "")
            return f"{session}:train:{sequence_number(request.model_seq_id, least=0)}", 0
        return self.tables.model_of(owner, request.model_id).id, sequence_number(request.seq_id, least=1)

    def _check_room(self, request: ClientRequest) -> None:
        """Refuse a request that would be one too many.

        Raises:
            RequestRefusedError: too many wait already.
        """
        is_sample = request.route == "asample"
        if self._unfinished[request.owner, is_sample] >= MAX_WAITING:
            kind = "for samples" if is_sample else "of models"
            raise RequestRefusedError(
                f"{MAX_WAITING} requests {kind} of this key wait already; send more when some have finished", "busy"
            )

    def _enqueue(self, request: ClientRequest) -> None:
        """Let an accepted request be executed."""
        self._done.setdefault(request.id, asyncio.Event())
        if request.route == "asample":
            self._samples[request.id] = self._spawn(self._sample(request._replace(body=b"")))
        elif request.subject in self.tables.models and request.route not in IMMEDIATE:
            model = self.tables.models[request.subject]
            model.waiting[request.sequence] = request.id
            if model.is_ready:
                self._turns.add(model)
                self._ready.set()

    # --- results ------------------------------------------------------------------------------------------------------

    async def retrieve(self, owner: str, request_id: str, seconds: float) -> RequestResult | None:
        """Return the result of a request; None if there is none after some seconds."""
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
        """Record a result, apply it once it is on disk, and wake its client."""
        self._samples.pop(request.id, None)
        self._unfinished[request.owner, request.route == "asample"] -= 1
        self._log.finish(RequestResult(request.id, kind, body))
        await self._log.flush()
        if kind == "json":
            self.tables.fold(request, json.loads(body))
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
        except asyncio.CancelledError:
            if request.id in self._samples:
                raise  # the server ends; the request is executed after the next start
            await self._fail(request, InputError("the request was cancelled by its client"))

    async def _cancel(self, owner: str, request_id: str) -> Mapping[str, Any]:
        """Stop a request for samples, unless it has a result."""
        while request_id in self._receiving:
            await self._log.flush()
            await asyncio.sleep(0)
        recorded = self._log.request(request_id)
        if recorded is None or recorded.owner != owner:
            raise RequestRefusedError(f"there is no request {request_id[:100]!r}", "model")
        if recorded.route != "asample":
            raise InputError(f"{request_id} is a request of {recorded.route}: only those for samples can be cancelled")
        await asyncio.sleep(0)  # cancelled before its first step, a task would record nothing
        task = self._samples.pop(request_id, None)
        if task is not None:
            task.cancel()
        return {}

    async def _execute_sample(self, request: ClientRequest) -> None:
        sampler = self.tables.samplers[request.subject]
        weights = sampler.weights
        if sampler.follows and sampler.model is not None:
            weights = sampler.model.newest
        source = SamplingSource(
            owner=request.owner,
            base=sampler.base,
            weights=weights,
            sampler_id=sampler.id,
            model_id="" if sampler.model is None else sampler.model.id,
        )
        try:
            if weights is not None and _is_removed(weights):
                raise InputError(
                    f"the weights of sampler {sampler.id} were removed: a server keeps the newest "
                    f"{self.tables.versions} unnamed samplers of "
                    f"{sampler.base.name if sampler.base.trains_all_weights else 'a model'} (checkpoint.versions)"
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

    # --- training -----------------------------------------------------------------------------------------------------

    async def _train(self) -> None:
        """Execute the requests of models, by turns of their owners."""
        while True:
            model = self._turns.next()
            if model is None:
                self._ready.clear()
                await self._ready.wait()
                continue
            request = self._log.request(model.waiting[model.next_sequence])
            assert request is not None
            before = model.trained_tokens
            if await self._execute(model, request):
                model.trained_tokens = max(model.trained_tokens, before + 1.0)
                del model.waiting[model.next_sequence]
                model.next_sequence += 1
            self._turns.end(model, model.trained_tokens - before)

    async def _execute(self, model: ClientModel, request: ClientRequest) -> bool:
        """Execute a request, or a part of what must come before it; returns whether it has its result."""
        try:
            if model.failure:
                raise InputError(f"the model {model.id} could not be created: {model.failure}")
            if request.route == REFUSED:
                raise InputError(request.body.decode())
            if not await self._training.prepare(model):
                return False
            outcome = await self._training.execute(model, request)
        except StorageError:
            raise
        except Exception as error:  # noqa: BLE001 - its client gets the reason
            if request.sequence == 0:
                model.failure = str(error)
            await self._fail(request, error)
        else:
            await self._finish(request, outcome.kind, outcome.body)
            if request.route in SAVES:
                self.tables.remove_expired(*self.tables.models.values())
            if outcome.weights is not None:
                self.tables.remove_old_versions(model)
            await self._training.keep_checkpoint(model, request)
        return True

    # --- answers ------------------------------------------------------------------------------------------------------

    async def answer(self, owner: str, question: str, request: Any) -> Mapping[str, Any]:  # noqa: C901, PLR0912
        """Answer a request that needs no wait."""
        match question:
            case "create_session":
                self.tables.check_room(owner, "sessions")
                session_id = secrets.token_hex(16)
                result = {"type": "create_session", "session_id": session_id}
                return await self._record_answer(owner, question, session_id, 0, {}, result)
            case "session_heartbeat":
                self.tables.session_of(owner, request.session_id)
                return {"type": "session_heartbeat"}
            case "finish_session":
                return await self._finish_session(owner, request.session_id)
            case "create_sampling_session":
                return await self._create_sampler(owner, request)
            case "cancel_future":
                return await self._cancel(owner, request.request_id)
            case "get_info":
                return model_info(self.tables.model_of(owner, request.model_id))
            case "weights_info":
                return weights_info(self.tables, owner, request.tinker_path)
            case "capabilities":
                return {"supported_models": [self._capabilities(base) for base in self.tables.bases.values()]}
            case "sessions":
                sessions = [session for session, whose in self.tables.sessions.items() if whose == owner]
                return page("sessions", sessions, request)
            case "session":
                return describe_session(self.tables, owner, request["session_id"])
            case "sampler":
                sampler = self.tables.sampler_of(owner, request["sampler_id"])
                return {"sampler_id": sampler.id, "base_model": sampler.base.name, "model_path": sampler.path}
            case "models":
                listed = page("training_runs", self.tables.models_of(owner), request)
                models = [await self._describe(model) for model in listed["training_runs"]]
                return {**listed, "training_runs": models}
            case "model":
                return await self._describe(self.tables.model_of(owner, request["model_id"]))
            case "checkpoints":
                return {"checkpoints": checkpoint_list(self.tables, self.tables.model_of(owner, request["model_id"]))}
            case "all_checkpoints":
                lists = [checkpoint_list(self.tables, model) for model in self.tables.models_of(owner)]
                return page("checkpoints", [one for checkpoints in lists for one in checkpoints], request)
            case "delete_checkpoint":
                return await self._delete(owner, request["model_id"], request["checkpoint"])
            case "set_checkpoint_ttl":
                return await self._set_ttl(owner, request)
        raise AssertionError(question)

    async def _record_answer(
        self, owner: str, route: str, subject: str, sequence: int, content: Any, result: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Record a request with its result, apply it once both are on disk, and return the result."""
        request = ClientRequest(
            f"{route}:{subject}:{sequence}", owner, route, subject, sequence, json.dumps(content).encode()
        )
        self._log.record(request, RequestResult(request.id, "json", json.dumps(result).encode()))
        await self._log.flush()
        self.tables.fold(request, result)
        return result

    async def _describe(self, model: ClientModel) -> dict[str, Any]:
        await self._log.flush()  # a model is known before its first request is on disk
        await asyncio.sleep(0)  # others run between two models of a list
        return describe_model(self.tables, model, self._log.last_received(model.id))

    async def _finish_session(self, owner: str, session_id: str) -> Mapping[str, Any]:
        if session_id in self.tables.finished and self.tables.sessions[session_id] == owner:
            return {}  # the SDK repeats a request whose answer it did not get
        session = self.tables.session_of(owner, session_id)
        return await self._record_answer(owner, "finish_session", session, 0, {}, {})

    async def _create_sampler(self, owner: str, request: messages.CreateSampler) -> Mapping[str, Any]:
        session = self.tables.session_of(owner, request.session_id)
        sampler_id = f"{session}:sample:{sequence_number(request.sampling_session_seq_id, least=0)}"
        result = {"type": "create_sampling_session", "sampling_session_id": sampler_id}
        if (known := self.tables.samplers.get(sampler_id)) is not None:
            if (known.base.name if request.base_model else None, known.path) != (
                request.base_model,
                request.model_path,
            ):
                raise InputError(
                    f"sampling_session_seq_id {request.sampling_session_seq_id} was used by another sampler"
                )
            return result  # the SDK repeats a request whose answer it did not get
        self.tables.check_room(owner, "samplers")
        if request.model_path is not None:
            self.tables.saved_of(owner, request.model_path, SAMPLER_WEIGHTS)
        elif request.base_model is None:
            raise InputError("create_sampling_session needs base_model or model_path")
        else:
            self.tables.base_of(request.base_model)
        content = {name: getattr(request, name) for name in request.__struct_fields__}
        sequence = request.sampling_session_seq_id
        return await self._record_answer(owner, "create_sampling_session", session, sequence, content, result)

    async def _delete(self, owner: str, model_id: str, checkpoint: str) -> Mapping[str, Any]:
        model = self.tables.model_of(owner, model_id)
        content = {"checkpoint": checkpoint}
        if checkpoint in model.saved:
            now = int(self._clock.wall() * 1e6)
            await self._record_answer(owner, "delete_checkpoint", model_id, now, content, {})
            self.tables.remove_old_versions(model)
        elif checkpoint not in model.deleted:  # otherwise the SDK repeats a request whose answer it did not get
            raise RequestRefusedError(f"there are no weights {checkpoint[:100]!r} of {model_id}", "model")
        return {}

    async def _set_ttl(self, owner: str, request: messages.SetTtl) -> Mapping[str, Any]:
        check_labels(request)
        model, now = self.tables.model_of(owner, request.model_id), self._clock.wall()
        if request.checkpoint not in model.saved:
            raise RequestRefusedError(f"there are no weights {request.checkpoint[:100]!r} of {model.id}", "model")
        expires = None if request.ttl_seconds is None else now + request.ttl_seconds
        content = {"checkpoint": request.checkpoint, "expires": expires}
        return await self._record_answer(owner, "set_checkpoint_ttl", model.id, int(now * 1e6), content, {})

    def archive(self, owner: str, model_id: str, checkpoint: str) -> Path:
        """Return the directory of saved weights, in PEFT's format."""
        kind = EXTERNAL_WEIGHTS if checkpoint.startswith(f"{EXTERNAL_WEIGHTS}/") else SAMPLER_WEIGHTS
        saved = self.tables.saved_of(owner, f"tinker://{model_id}/{checkpoint}", kind)
        assert saved.weights is not None
        return Path(saved.weights.path)

    def _capabilities(self, base: BaseModel) -> dict[str, Any]:
        context = self._engine.capabilities.max_context
        return {"model_name": base.name, "max_context_length": context, "trainable": True, "sampleable": True}


def _repeats(request: Any, known: ClientRequest) -> bool:
    """Whether a request differs from a known one of its route only in its sampler's number.

    The SDK takes a new number for each try, and then uses the number in the answer.
    """
    if not isinstance(request, messages.SaveForSampler) or request.sampling_session_seq_id is None:
        return False
    earlier = messages.read_request(known.route, known.body)
    number = earlier.sampling_session_seq_id
    return number is not None and msgspec.structs.replace(request, sampling_session_seq_id=number) == earlier


def _is_removed(weights: WeightsRef) -> bool:
    return not Path(weights.path).is_dir()


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
    plan, chosen = await asyncio.to_thread(with_chosen_settings, config.run, RunDirectory.config(path))
    for line in filter(None, chosen):
        tell(line)
    is_new = not (path / "journal").is_dir()
    directory = RunDirectory.create(path, plan.model_dump_json(indent=1)) if is_new else RunDirectory.reopen(path)
    info = {"name": config.name, "config": plan.model_dump(mode="json"), "code": {}}
    async with contextlib.AsyncExitStack() as stack:
        store = SqliteJournal(directory.journal, info=info)
        stack.push_async_callback(store.close)
        await _check_unchanged(config, plan, store)
        stack.enter_context(recording_process_state(directory.path))
        bases = await asyncio.to_thread(_load_bases, config, plan, directory)
        versions = {policy: PolicyVersion(policy, 0, 0) for policy in plan.policies}
        engine = await make_engine(plan.engine_plan, versions, tell, directory.engine_log)
        stack.push_async_callback(engine.close)
        service = TinkerService(config, directory, store, bases, engine, clock, tell)
        stack.push_async_callback(service.close)
        await service.start()
        yield service
        record_process_state(directory.path, "stopped")


async def _check_unchanged(config: ServerConfig, plan: RunConfig, store: SqliteJournal) -> None:
    """Refuse to continue clients' models on another base model or with other fixed settings, and record new bases.

    Raises:
        ConfigError: a setting or a model's file differs.
        InputError: a file cannot be read.
    """
    before, recorded = store.config(), store.info().get("models")
    if not (store.directory / REQUESTS_FILE).exists():  # no start has served a client yet
        before, recorded = plan.model_dump(mode="json"), []
    config.check_unchanged(before, plan)
    paths: dict[tuple[str, ...], str] = {("models", name, "path"): model.path for name, model in config.models.items()}
    await asyncio.to_thread(check_models_unchanged, paths, recorded)
    known = decode_models(recorded)
    new = {setting: path for setting, path in paths.items() if ".".join(setting) not in {one.setting for one in known}}
    if new:
        models = [*known, *await asyncio.to_thread(record_models, new)]
        earlier = before.get("policies")
        policies = {**plan.model_dump(mode="json")["policies"], **(earlier if isinstance(earlier, dict) else {})}
        await store.describe(config={**before, "policies": policies}, models=msgspec.to_builtins(models))


def _load_bases(config: ServerConfig, plan: RunConfig, directory: RunDirectory) -> dict[str, BaseModel]:
    """Load the base models for training, with their tokenizers."""
    from agentrl.learn.ranks import rank_device
    from agentrl.rollout.chat.chat_format import read_tokenizer
    from agentrl.rollout.chat.chat_template import stop_token_ids
    from agentrl.tinker.trainer import ClientTrainer

    device = rank_device(0, stays_on_cpu=plan.stays_on_cpu)
    return {
        name: BaseModel(
            name=name,
            policy=config.policies_of(name)[0],
            own_policy=config.policies_of(name)[1],
            trainer=ClientTrainer(plan.trainer_plan, Path(model.path), directory.path, device),
            decode=functools.partial(
                read_tokenizer(Path(model.path) / "tokenizer.json").decode, skip_special_tokens=False
            ),
            stop_token_ids=tuple(stop_token_ids(Path(model.path))),
            tokenizer=model.tokenizer or os.path.abspath(model.path),
            max_rank=0 if model.weights == "full" else model.max_rank,
        )
        for name, model in config.models.items()
    }
