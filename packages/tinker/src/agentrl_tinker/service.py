"""A server for clients of the Tinker protocol: their models, in the order of their requests, over the journal.

A client's model is an adapter on a base model, or trains all its weights. Its requests are executed by their sequence
numbers, in one thread for all models. The journal decides everything: a request is in it before the client knows its
id, and a result before the client can see it. What is in memory follows from it: `tables.py` holds what clients have,
`model_training.py` their models, and `checks.py` refuses bad requests.

Invariants: an acknowledged step is part of every later version, once; a result never changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from agentrl import AgentRLError
from agentrl.parts import (
    ClientRequest,
    InputError,
    NonFiniteError,
    Parts,
    RequestResult,
    StorageError,
    WeightsRef,
    open_parts,
)
from agentrl_tinker import messages
from agentrl_tinker.answers import checkpoint_list, describe_model, describe_session, model_info, page, weights_info
from agentrl_tinker.checks import check_labels, check_request
from agentrl_tinker.errors import RequestRefusedError
from agentrl_tinker.model_training import ModelTraining
from agentrl_tinker.samples import answer_sample
from agentrl_tinker.tables import (
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
    from agentrl_tinker.config import ServerConfig

REFUSED = "refused"
"""Route of the record that a refused request used its sequence number up; its body is the reason."""
MAX_WAITING = 4096
"""Maximum number of accepted requests that are not finished."""
MAX_WAITING_BYTES = 256 << 20
"""Maximum size of their bodies."""
MAX_SAMPLING = 256
"""Maximum number of requests for samples that are executed at once; others wait on disk."""
MAX_IN_A_ROW = 16
"""Maximum number of requests of one model that are executed in a row while another model waits: models that train all
weights of one base take each other's place in memory."""


class TinkerService:
    """Executes the requests of clients. Refusals are `InputError`.

    Args:
        config: configuration of the server.
        parts: parts of the run.
        tell: receives lines for the user.
    """

    def __init__(self, config: ServerConfig, parts: Parts, tell: Callable[[str], None]) -> None:
        self.parts = parts
        self._log = parts.requests
        self._tell = tell
        self._seed = config.seed
        self._recorded = parts.sampler.recorded(request.id for request in self._log.unfinished())
        """Samples in the journal of requests without a result, by request."""
        checkpoint = config.run.checkpoint
        self.tables = ClientTables(parts, _bases(config, parts), checkpoint.versions)
        self._training = ModelTraining(
            self.tables, parts, max_models=config.max_models, checkpoint_every=checkpoint.every
        )
        self._receiving: dict[str, ClientRequest] = {}
        """Accepted requests that may not be on disk yet, by id."""
        self._done: dict[str, asyncio.Event] = {}
        """Set when a request has its result, by id; only those that are not finished."""
        self._unfinished: dict[str, int] = {}
        """Size of the bodies of unfinished requests, by id."""
        self._sampling = asyncio.Semaphore(MAX_SAMPLING)
        self._samples: dict[str, asyncio.Task[None]] = {}
        """Requests for samples that can be cancelled, by id."""
        self._waiting: dict[str, ClientModel] = {}
        """Models whose next request is there, by id: those that have waited longest first."""
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
        self.tables.remove_expired(*self.tables.models.values())
        for model in self.tables.models.values():
            self.tables.remove_old_versions(model)  # only now are all names known
            model.next_sequence = self._log.finished_through(model.id) + 1
            created = self._log.result(f"{model.id}:0")
            if created is not None and created.kind == "error":
                model.failure = json.loads(created.body)["error"]
        for request in self._log.unfinished():
            self._unfinished[request.id] = len(request.body)
            self._enqueue(request)
        self._spawn(self._train())

    async def close(self) -> None:
        """Stop executing; the journal holds what is unfinished."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._training.close()

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

    async def accept(self, route: str, request: Any, body: bytes) -> Mapping[str, Any]:
        """Accept a request of `messages.FUTURES`; return its id and other data of the promise.

        Once this returns, the request survives any crash.
        """
        subject, sequence = self._place(route, request)
        request_id = f"{subject}:{sequence}"
        known = self._receiving.get(request_id) or self._log.request(request_id)
        if known is None or known.route == REFUSED:
            try:
                check_request(self.tables, request, max_context=self.parts.sampler.max_context)
            except InputError as error:
                await self.refuse(subject, sequence, str(error))
                raise
            if known is not None:
                raise InputError(f"seq_id {sequence} of {subject} was used by a refused request: {known.body.decode()}")
            known = ClientRequest(request_id, route, subject, sequence, body)
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

    async def refuse(self, model_id: str, sequence: int, reason: str) -> None:
        """Use up the sequence number of a refused request: its client's next ones have the numbers after it.

        The reason is queued like a request, and fails with it in its turn.
        """
        model, request_id = self.tables.models.get(model_id), f"{model_id}:{sequence}"
        if model is None or not max(1, model.next_sequence) <= sequence < 1 << 63:
            return
        if request_id not in self._receiving and self._log.request(request_id) is None:
            refused = ClientRequest(request_id, REFUSED, model_id, sequence, reason.encode(errors="replace"))
            self._check_room(refused)
            self._receive(refused)
            await self._log.flush()

    def _receive(self, request: ClientRequest) -> None:
        """Queue an accepted request for the disk, and let it be executed once it is there."""
        self._receiving[request.id] = request
        self._unfinished[request.id] = len(request.body)
        self._done[request.id] = asyncio.Event()
        self._log.receive(request)
        self._spawn(self._begin(request))

    async def _begin(self, request: ClientRequest) -> None:
        """Let a request be executed once it is on disk, even if its client has left."""
        await self._log.flush()
        del self._receiving[request.id]
        self._enqueue(request)

    def _place(self, route: str, request: Any) -> tuple[str, int]:
        """Return what a request acts on, and its sequence number there.

        Raises:
            RequestRefusedError: there is no such session, model or sampler.
            InputError: the number is missing.
        """
        if route == "asample":
            sampler = self.tables.sampler_of(request.sampling_session_id)
            return sampler.id, sequence_number(request.seq_id, least=0)
        if route == "create_model" or (route == "load_weights" and request.model_id is None):
            session = self.tables.session_of(request.session_id or "")
            return f"{session}:train:{sequence_number(request.model_seq_id, least=0)}", 0
        return self.tables.model_of(request.model_id).id, sequence_number(request.seq_id, least=1)

    def _check_room(self, request: ClientRequest) -> None:
        """Refuse a request that would be one too many.

        Raises:
            RequestRefusedError: too many wait already.
        """
        size = sum(self._unfinished.values())
        if len(self._unfinished) >= MAX_WAITING or size + len(request.body) > MAX_WAITING_BYTES:
            raise RequestRefusedError(
                f"{len(self._unfinished)} requests with {size} bytes wait already; send more when some have finished",
                429,
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
                self._waiting.setdefault(model.id, model)
                self._ready.set()

    # --- results ------------------------------------------------------------------------------------------------------

    async def retrieve(self, request_id: str, seconds: float) -> RequestResult | None:
        """Return the result of a request; None if there is none after some seconds.

        Raises:
            RequestRefusedError: there is no such request.
        """
        event = self._done.get(request_id)
        if event is not None:
            try:
                await asyncio.wait_for(event.wait(), seconds)
            except TimeoutError:
                return None
        result = self._log.result(request_id)
        if result is None:
            raise RequestRefusedError(f"there is no request {request_id[:100]!r}", 404)
        return result

    async def _finish(self, request: ClientRequest, kind: str, body: bytes) -> None:
        """Record a result, apply it once it is on disk, and wake its client."""
        self._samples.pop(request.id, None)
        self._unfinished.pop(request.id, None)
        self._log.finish(RequestResult(request.id, kind, body))
        await self._log.flush()
        if kind == "json":
            self.tables.fold(request, json.loads(body))
        self._done.pop(request.id, asyncio.Event()).set()

    async def _fail(self, request: ClientRequest, error: Exception) -> None:
        """Record that a request failed; a failure that is not the client's is told to the user, too."""
        is_client = isinstance(error, InputError | NonFiniteError)
        if not is_client:
            self._tell(f"request {request.id} ({request.route}) failed: {type(error).__name__}: {error}")
        sentence = str(error) if isinstance(error, AgentRLError) else "the server failed to execute this request"
        content = {"error": sentence, "category": "user" if is_client else "server"}
        await self._finish(request, "error", json.dumps(content).encode())

    # --- samples ------------------------------------------------------------------------------------------------------

    async def _sample(self, request: ClientRequest) -> None:
        """Execute a request for samples, whose body is read when its turn comes."""
        try:
            async with self._sampling:
                await self._execute_sample(request)
        except asyncio.CancelledError:
            if request.id in self._samples:
                raise  # the server ends; the request is executed after the next start
            await self._fail(request, InputError("the request was cancelled by its client"))

    async def _cancel(self, request_id: str) -> Mapping[str, Any]:
        """Stop a request for samples, unless it has a result."""
        while request_id in self._receiving:
            await self._log.flush()
            await asyncio.sleep(0)
        recorded = self._log.request(request_id)
        if recorded is None:
            raise RequestRefusedError(f"there is no request {request_id[:100]!r}", 404)
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
        origin = {"sampler": sampler.id, "model": "" if sampler.model is None else sampler.model.id}
        try:
            if weights is not None and _is_removed(weights):
                raise InputError(
                    f"the weights of sampler {sampler.id} were removed: a server keeps the newest "
                    f"{self.tables.versions} unnamed samplers of "
                    f"{sampler.base.name if sampler.base.trains_all_weights else 'a model'} (checkpoint.versions)"
                )
            recorded = self._log.request(request.id)
            assert recorded is not None
            body = await answer_sample(
                self.parts.sampler,
                request.id,
                messages.read_request(request.route, recorded.body),
                weights or sampler.base.own_policy,
                origin,
                self._seed,
                self._recorded.get(request.id),
            )
        except StorageError:
            raise
        except Exception as error:  # noqa: BLE001 - its client gets the reason
            await self._fail(request, error)
        else:
            await self._finish(request, "protobuf", body)

    # --- training -----------------------------------------------------------------------------------------------------

    async def _train(self) -> None:
        """Execute the requests of models: of the model that has waited longest, or again of the last one."""
        model, in_a_row = None, 0
        while True:
            if not self._waiting:
                self._ready.clear()
                await self._ready.wait()
            if model is None or model.id not in self._waiting or in_a_row >= MAX_IN_A_ROW:
                model, in_a_row = next(iter(self._waiting.values())), 0
            request = self._log.request(model.waiting[model.next_sequence])
            assert request is not None
            await self._execute(model, request)
            in_a_row += 1
            del model.waiting[model.next_sequence]
            model.next_sequence += 1
            del self._waiting[model.id]
            if model.is_ready:
                self._waiting[model.id] = model

    async def _execute(self, model: ClientModel, request: ClientRequest) -> None:
        """Execute a request of a model."""
        try:
            if model.failure:
                raise InputError(f"the model {model.id} could not be created: {model.failure}")
            if request.route == REFUSED:
                raise InputError(request.body.decode())
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

    # --- answers ------------------------------------------------------------------------------------------------------

    async def answer(self, question: str, request: Any) -> Mapping[str, Any]:  # noqa: C901, PLR0912
        """Answer a request that needs no wait."""
        match question:
            case "create_session":
                session_id = secrets.token_hex(16)
                result = {"type": "create_session", "session_id": session_id}
                return await self._record_answer(question, session_id, 0, {}, result)
            case "session_heartbeat":
                self.tables.session_of(request.session_id)
                return {"type": "session_heartbeat"}
            case "finish_session":
                return await self._finish_session(request.session_id)
            case "create_sampling_session":
                return await self._create_sampler(request)
            case "cancel_future":
                return await self._cancel(request.request_id)
            case "get_info":
                return model_info(self.tables.model_of(request.model_id))
            case "weights_info":
                return weights_info(self.tables, request.tinker_path)
            case "capabilities":
                return {"supported_models": [self._capabilities(base) for base in self.tables.bases.values()]}
            case "sessions":
                return page("sessions", [*self.tables.sessions], request)
            case "session":
                return describe_session(self.tables, request["session_id"])
            case "sampler":
                sampler = self.tables.sampler_of(request["sampler_id"])
                return {"sampler_id": sampler.id, "base_model": sampler.base.name, "model_path": sampler.path}
            case "models":
                listed = page("training_runs", [*self.tables.models.values()], request)
                models = [await self._describe(model) for model in listed["training_runs"]]
                return {**listed, "training_runs": models}
            case "model":
                return await self._describe(self.tables.model_of(request["model_id"]))
            case "checkpoints":
                return {"checkpoints": checkpoint_list(self.tables, self.tables.model_of(request["model_id"]))}
            case "all_checkpoints":
                lists = [checkpoint_list(self.tables, model) for model in self.tables.models.values()]
                return page("checkpoints", [one for checkpoints in lists for one in checkpoints], request)
            case "delete_checkpoint":
                return await self._delete(request["model_id"], request["checkpoint"])
            case "set_checkpoint_ttl":
                return await self._set_ttl(request)
        raise AssertionError(question)

    async def _record_answer(
        self, route: str, subject: str, sequence: int, content: Any, result: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Record a request with its result, apply it once both are on disk, and return the result."""
        request = ClientRequest(f"{route}:{subject}:{sequence}", route, subject, sequence, json.dumps(content).encode())
        self._log.record(request, RequestResult(request.id, "json", json.dumps(result).encode()))
        await self._log.flush()
        self.tables.fold(request, result)
        return result

    async def _describe(self, model: ClientModel) -> dict[str, Any]:
        await self._log.flush()  # a model is known before its first request is on disk
        await asyncio.sleep(0)  # others run between two models of a list
        return describe_model(self.tables, model, self._log.last_received(model.id))

    async def _finish_session(self, session_id: str) -> Mapping[str, Any]:
        if session_id in self.tables.finished:
            return {}  # the SDK repeats a request whose answer it did not get
        session = self.tables.session_of(session_id)
        return await self._record_answer("finish_session", session, 0, {}, {})

    async def _create_sampler(self, request: messages.CreateSampler) -> Mapping[str, Any]:
        session = self.tables.session_of(request.session_id)
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
        if request.model_path is not None:
            self.tables.saved_of(request.model_path, SAMPLER_WEIGHTS)
        elif request.base_model is None:
            raise InputError("create_sampling_session needs base_model or model_path")
        else:
            self.tables.base_of(request.base_model)
        content = {name: getattr(request, name) for name in request.__struct_fields__}
        sequence = request.sampling_session_seq_id
        return await self._record_answer("create_sampling_session", session, sequence, content, result)

    async def _delete(self, model_id: str, checkpoint: str) -> Mapping[str, Any]:
        model = self.tables.model_of(model_id)
        content = {"checkpoint": checkpoint}
        if checkpoint in model.saved:
            now = int(self.parts.clock.wall() * 1e6)
            await self._record_answer("delete_checkpoint", model_id, now, content, {})
            self.tables.remove_old_versions(model)
        elif checkpoint not in model.deleted:  # otherwise the SDK repeats a request whose answer it did not get
            raise RequestRefusedError(f"there are no weights {checkpoint[:100]!r} of {model_id}", 404)
        return {}

    async def _set_ttl(self, request: messages.SetTtl) -> Mapping[str, Any]:
        check_labels(request)
        model, now = self.tables.model_of(request.model_id), self.parts.clock.wall()
        if request.checkpoint not in model.saved:
            raise RequestRefusedError(f"there are no weights {request.checkpoint[:100]!r} of {model.id}", 404)
        expires = None if request.ttl_seconds is None else now + request.ttl_seconds
        content = {"checkpoint": request.checkpoint, "expires": expires}
        return await self._record_answer("set_checkpoint_ttl", model.id, int(now * 1e6), content, {})

    def archive(self, model_id: str, checkpoint: str) -> Path:
        """Return the directory of saved weights, in PEFT's format."""
        kind = EXTERNAL_WEIGHTS if checkpoint.startswith(f"{EXTERNAL_WEIGHTS}/") else SAMPLER_WEIGHTS
        saved = self.tables.saved_of(f"tinker://{model_id}/{checkpoint}", kind)
        assert saved.weights is not None
        return Path(saved.weights.path)

    def _capabilities(self, base: BaseModel) -> dict[str, Any]:
        context = self.parts.sampler.max_context
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


def _bases(config: ServerConfig, parts: Parts) -> dict[str, BaseModel]:
    """Return the base models, by the name that clients use."""
    bases = {}
    for name, model in config.models.items():
        policy, own_policy = config.policies_of(name)
        bases[name] = BaseModel(
            name=name,
            policy=policy,
            own_policy=own_policy,
            learner=parts.learners[policy],
            tokenizer=model.tokenizer or os.path.abspath(config.run.trained[policy].model),
            max_rank=0 if model.weights == "full" else model.max_rank,
        )
    return bases


@contextlib.asynccontextmanager
async def open_service(config: ServerConfig, tell: Callable[[str], None]) -> AsyncIterator[TinkerService]:
    """Open the run directory of a server, load its models, and execute requests until the context is left.

    Raises:
        InputError: a model or a setting cannot be used.
        StorageError: a record of an earlier process is damaged.
    """
    async with open_parts(config.run, tell) as parts:
        service = TinkerService(config, parts, tell)
        await service.start()
        try:
            yield service
        finally:
            await service.close()
