"""Executes client requests; evicts and restores models.

One thread trains. A model that is not in memory, after a start or because others took its place, is read from its
newest checkpoint, and the finished requests since then are executed again, from their recorded bodies; each repeated
step must have the gradient norm that it had.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import msgspec

from agentrl.core.clock import Clock
from agentrl.core.errors import InputError, TrainerError
from agentrl.core.files import remove_whole, rename_durably, staging_directory
from agentrl.core.records import PolicyVersion, StepReport, TrainBatch, WeightsRef
from agentrl.journal.port import StepRow
from agentrl.journal.requests import ClientRequest, RequestLog
from agentrl.journal.store import SqliteJournal
from agentrl.observe.run_directory import RunDirectory
from agentrl.orchestrator.versions import record_published_version
from agentrl.tinker import messages
from agentrl.tinker.stability import find_distributions
from agentrl.tinker.tables import (
    EXTERNAL_WEIGHTS,
    SAMPLER_WEIGHTS,
    WEIGHTS,
    ClientModel,
    ClientTables,
    UnpublishedSteps,
    sampler_id_of,
)

P = ParamSpec("P")
T = TypeVar("T")

GRADIENT_TOLERANCE = 1e-3
"""Largest relative difference between the gradient norms of a step and of its repetition after a start."""

RELOADING_TOKENS = 1 << 14
"""Tokens that a model with all weights trains on before another one takes its place in memory, while both wait."""

RESTORING_TOKENS = 1 << 10
"""The same, of a model with an adapter, while memory is full."""

_CHANGES = ("forward_backward", "optim_step", "load_weights", "save_weights_for_sampler", "save_weights_external")
"""Routes that change or publish the weights or the gradient."""


class Outcome(NamedTuple):
    """What a request did: the encoded result, and the version that it published."""

    kind: str
    body: bytes
    weights: WeightsRef | None = None

    @staticmethod
    def of(content: Mapping[str, Any], weights: WeightsRef | None = None) -> Outcome:
        """Make an outcome of JSON data."""
        return Outcome("json", json.dumps(content).encode(), weights)

    @property
    def content(self) -> Any:
        """The JSON data."""
        return json.loads(self.body)


class ModelTraining:
    """Executes the requests of models, one at a time.

    Args:
        tables: what clients have.
        log: the recorded requests.
        store: the journal.
        directory: the run directory.
        clock: times passes.
        max_models: number of models in memory at once.
        checkpoint_every: steps between checkpoints of a model; 0: none.
    """

    def __init__(
        self,
        tables: ClientTables,
        log: RequestLog,
        store: SqliteJournal,
        directory: RunDirectory,
        clock: Clock,
        *,
        max_models: int,
        checkpoint_every: int,
    ) -> None:
        self._tables = tables
        self._log = log
        self._store = store
        self._directory = directory
        self._clock = clock
        self._max_models = max_models
        self._checkpoint_every = checkpoint_every
        self._repeating: dict[str, deque[str]] = {}
        """Ids of finished requests that a model in memory lacks, by the model's id."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="agentrl-trainer")

    def turn(self, model: ClientModel) -> float:
        """Return the tokens by which a model's turn is decided; the lowest is next."""
        if model.base.trainer.has(model.id):
            return model.trained_tokens
        if model.lora is None:
            return model.trained_tokens + RELOADING_TOKENS * bool(model.base.trainer.learners)
        resident = sum(len(base.trainer.learners) for base in self._tables.bases.values())
        return model.trained_tokens + RESTORING_TOKENS * (resident >= self._max_models)

    async def prepare(self, model: ClientModel) -> bool:
        """Read a part of a model into memory; returns whether it is there. Each part is a turn of its owner, so that
        others do not wait for all requests that it repeats.

        Others leave if it needs all weights of their base, or if there are too many: the one that was used least
        recently of the owner that has the most.

        Raises:
            TrainerError: a repeated step has another gradient than it had, or the checkpoint of loaded weights is
                missing. The model is not in memory then.
        """
        model.used_at = self._clock.monotonic()
        if model.base.trainer.has(model.id):
            return model.id not in self._repeating or await self._call(self._repeat_one, model)
        resident = [other for other in self._tables.models.values() if other.base.trainer.has(other.id)]
        leaving = [other for other in resident if model.lora is None and other.base is model.base]
        staying = [other for other in resident if other not in leaving]
        while len(staying) >= self._max_models:
            count = Counter(other.owner for other in (*staying, model))
            leaving.append(min(staying, key=lambda one: (-count[one.owner], one.used_at)))
            staying.remove(leaving[-1])
        for other in leaving:
            await self._call(self._evict, other)
        return await self._call(self._begin_restoring, model)

    async def execute(self, model: ClientModel, request: ClientRequest) -> Outcome:
        """Execute a request of a prepared model, and record the version that it published."""
        content = messages.read_request(request.route, request.body)
        try:
            outcome = await self._call(self._apply, model, request, content)
        except InputError:
            raise
        except Exception:
            if request.route in ("optim_step", "load_weights"):
                # It may have changed the weights in part; without it, they are rebuilt from the journal.
                await self._call(self._forget, model)
            raise
        if outcome.weights is not None and outcome.weights != model.newest:
            await self._record_version(model, outcome.weights)
        return outcome

    async def keep_checkpoint(self, model: ClientModel, request: ClientRequest) -> None:
        """Write a checkpoint after a finished request if one is due and there is no gradient, which it would lack."""
        every = self._checkpoint_every
        if every and model.steps_since_checkpoint >= every and not model.has_gradient:
            await self._call(self._write_checkpoint, model, request.sequence)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def _call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, functools.partial(function, *args, **kwargs)
        )

    # --- requests -----------------------------------------------------------------------------------------------------

    def _apply(self, model: ClientModel, request: ClientRequest, content: Any) -> Outcome:
        """Execute a request of a model in memory, in the trainer's thread."""
        trainer = model.base.trainer
        match content:
            case messages.CreateModel():
                return Outcome.of({"type": "create_model", "model_id": model.id})
            case messages.LoadWeights():
                if not self._checkpoint(model, request.sequence).is_dir():  # else a killed process loaded them
                    self._load(model, content)
                    self._write_checkpoint(model, request.sequence)  # the files may be gone when it is rebuilt
                return Outcome.of({"type": "load_weights", "path": content.path, "model_id": model.id})
            case messages.ForwardBackwardRequest():
                return self._forward_backward(model, request, content)
            case messages.OptimStep():
                return Outcome.of({"type": "optim_step", "metrics": {"grad_norm": self._optim_step(model, content)}})
            case messages.SaveWeights():
                self._tables.check_unused(model, content)
                directory = self._tables.saved_directory(model, request.sequence)
                with _writing(directory) as staging:
                    trainer.save(model.id, staging / "state")
                    shutil.rmtree(directory, ignore_errors=True)  # left by a process that was killed
                    rename_durably(staging, directory)
                path = f"tinker://{model.id}/{WEIGHTS}/{content.path}"
                return Outcome.of({"type": "save_weights", "path": path})
            case messages.SaveForSampler() | messages.SaveExternal():
                if isinstance(content, messages.SaveForSampler):
                    self._tables.check_unused(model, content)
                weights = self._publish(model)
                result: dict[str, Any] = {
                    "type": request.route,
                    "agentrl_version": list(weights.version),
                    "agentrl_step": trainer.step(model.id),
                }
                if isinstance(content, messages.SaveExternal):
                    result["path"] = f"tinker://{model.id}/{EXTERNAL_WEIGHTS}/{content.path}"
                elif content.path is not None:
                    result["path"] = f"tinker://{model.id}/{SAMPLER_WEIGHTS}/{content.path}"
                else:
                    result["sampling_session_id"] = sampler_id_of(model, content)
                return Outcome.of(result, weights)
        raise AssertionError(request.route)

    def _forward_backward(
        self, model: ClientModel, request: ClientRequest, content: messages.ForwardBackwardRequest
    ) -> Outcome:
        from agentrl.tinker.losses import CLIENT_LOSSES

        started = self._clock.monotonic()
        distributions = None
        if CLIENT_LOSSES[content.loss_fn].reads_sampler:
            distributions = find_distributions(self._log, model.owner, content.rows)
        result = model.base.trainer.forward(
            model.id,
            content.rows,
            content.loss_fn,
            content.settings,
            backward=not content.forward_only,
            distributions=distributions,
        )
        tokens = sum(len(row.token_ids) for row in content.rows)
        model.trained_tokens += tokens
        if not content.forward_only:
            model.has_gradient = True
            seconds = self._clock.monotonic() - started
            model.unpublished.add(request.body, len(content.rows), tokens, result.loss, seconds)
        body = messages.write_forward_backward(result.logprobs, {"loss:sum": result.loss})
        return Outcome("protobuf", body)

    def _optim_step(self, model: ClientModel, content: messages.OptimStep) -> float:
        from agentrl.tinker.trainer import AdamSettings

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
        # Expiry was checked at acceptance.
        saved = self._tables.saved_of(model.owner, content.path, WEIGHTS, expired=True)
        directory = self._tables.saved_directory(self._tables.saved_model(saved.path), saved.sequence)
        model.base.trainer.load(model.id, directory / "state", optimizer=content.optimizer)
        model.has_gradient = False

    def _publish(self, model: ClientModel) -> WeightsRef:
        """Publish a model's weights as its next version, unless its newest version has them already."""
        if model.newest is None:
            return model.base.trainer.write_version(model.id, PolicyVersion(model.base.policy, model.number, 0))
        if model.newest_step == model.base.trainer.step(model.id) and Path(model.newest.path).is_dir():
            return model.newest
        version = model.newest.version._replace(step=model.newest.version.step + 1)
        return model.base.trainer.write_version(model.id, version)

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

    # --- models in memory ---------------------------------------------------------------------------------------------

    def _evict(self, model: ClientModel) -> None:
        """Remove a model from memory, after a checkpoint of steps that would have to be repeated."""
        is_whole = model.id not in self._repeating
        if is_whole and self._checkpoint_every and model.steps_since_checkpoint and not model.has_gradient:
            self._write_checkpoint(model, model.next_sequence - 1)
        self._forget(model)

    def _forget(self, model: ClientModel) -> None:
        """Remove a model from memory, if it is there; its next request rebuilds it."""
        self._repeating.pop(model.id, None)
        if model.base.trainer.has(model.id):
            model.base.trainer.remove(model.id)

    @contextlib.contextmanager
    def _restoring(self, model: ClientModel) -> Iterator[None]:
        """Remove a model that cannot be rebuilt: one that is rebuilt in part must not serve the next request."""
        try:
            yield
        except BaseException:
            self._forget(model)
            raise

    def _begin_restoring(self, model: ClientModel) -> bool:
        """Read a model's newest checkpoint; returns whether no finished request since then must be executed again."""
        with self._restoring(model):
            trainer = model.base.trainer
            trainer.add(model.id, model.lora, model.seed)
            model.has_gradient = False
            model.unpublished = UnpublishedSteps()
            checkpoint = next(iter(self._checkpoints(model)), None)
            sequence = -1 if checkpoint is None else int(checkpoint.name)
            if checkpoint is not None:
                trainer.restore(model.id, checkpoint / "state")
                unpublished = (checkpoint / "unpublished.json").read_bytes()
                model.unpublished = msgspec.json.decode(unpublished, type=UnpublishedSteps)
            model.steps_since_checkpoint = 0
            requests = list(self._repeated(model, sequence))
            if requests:
                self._repeating[model.id] = deque(requests)
        return not requests

    def _repeat_one(self, model: ClientModel) -> bool:
        """Execute the next finished request of a model again; returns whether it was the last."""
        with self._restoring(model):
            name, turns = self._repeating[model.id].popleft(), model.trained_tokens
            request = self._log.request(name)
            assert request is not None
            content = messages.read_request(request.route, request.body)
            if isinstance(content, messages.LoadWeights):
                raise TrainerError(
                    f"{self._checkpoint(model, request.sequence).parent}: the checkpoint of request "
                    f"{request.sequence}, which loaded weights, is missing; restore it from a copy"
                )
            if isinstance(content, messages.SaveForSampler | messages.SaveExternal):
                model.unpublished = UnpublishedSteps()
            else:
                outcome = self._apply(model, request, content)
                if isinstance(content, messages.OptimStep):
                    self._check_repetition(model, request, outcome)
            model.trained_tokens = turns
        if not self._repeating[model.id]:
            del self._repeating[model.id]
        return model.id not in self._repeating

    def _repeated(self, model: ClientModel, after: int) -> Iterator[str]:
        """Yield the ids of the finished requests after a sequence number that changed or published the weights, or
        changed the gradient."""
        for request in self._log.of_subject(model.id, after):
            if request.sequence >= model.next_sequence:
                return
            result = self._log.result(request.id)
            if request.route in _CHANGES and result is not None and result.kind != "error":
                yield request.id

    def _check_repetition(self, model: ClientModel, request: ClientRequest, outcome: Outcome) -> None:
        result = self._log.result(request.id)
        assert result is not None
        before, now = json.loads(result.body)["metrics"]["grad_norm"], outcome.content["metrics"]["grad_norm"]
        if not math.isclose(before, now, rel_tol=GRADIENT_TOLERANCE, abs_tol=1e-12):
            raise TrainerError(
                f"{model.id}: the step of request {request.sequence} had a gradient norm of {before:.6g}, and "
                f"{now:.6g} when it was repeated from the journal; the model's base or the code has changed since"
            )

    def _write_checkpoint(self, model: ClientModel, sequence: int) -> None:
        """Write a checkpoint of the model after a request, and remove the older ones."""
        directory = self._checkpoint(model, sequence)
        with _writing(directory) as staging:
            model.base.trainer.save(model.id, staging / "state")
            (staging / "unpublished.json").write_bytes(msgspec.json.encode(model.unpublished))
            rename_durably(staging, directory)
            for older in self._checkpoints(model)[1:]:
                remove_whole(older)
        model.steps_since_checkpoint = 0
        if model.lora is None:
            self._remove_old_checkpoints(model)

    def _remove_old_checkpoints(self, model: ClientModel) -> None:
        """Remove checkpoints, which are large, of older models with all weights of a base, as long as the journal can
        rebuild them: without loaded weights, whose files may be gone."""
        loaded = {request.subject for request in self._log.requests("load_weights")}
        others = [other for other in self._tables.models.values() if other.base is model.base and other is not model]
        others.sort(key=lambda other: (other.used_at, other.number))
        keep = self._tables.versions
        for other in others[: max(0, len(others) - keep + 1)] if keep else ():
            for checkpoint in self._checkpoints(other) if other.id not in loaded else ():
                remove_whole(checkpoint)

    def _checkpoints(self, model: ClientModel) -> list[Path]:
        """List the checkpoints of a model, the newest first."""
        places = self._checkpoint(model, 0).parent.glob("*")
        return sorted((place for place in places if place.name.isdecimal()), key=lambda place: -int(place.name))

    def _checkpoint(self, model: ClientModel, sequence: int) -> Path:
        return self._directory.checkpoints / "models" / str(model.number) / str(sequence)


@contextlib.contextmanager
def _writing(directory: Path) -> Iterator[Path]:
    """Yield a staging directory for saved weights.

    Raises:
        StorageError: writing failed.
    """
    from agentrl.learn.storage import converting_write_errors

    with converting_write_errors(directory), staging_directory(directory, depth=3) as staging:
        yield staging
