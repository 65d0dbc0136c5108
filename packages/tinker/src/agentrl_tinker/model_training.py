"""Executes client requests of models; evicts and restores models.

One thread trains. A model that is not in memory, after a start or because others took its place, is read from its
newest checkpoint, and the finished requests since then are executed again, from their recorded bodies; each repeated
step must have the gradient norm that it had.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from agentrl.parts import ClientRequest, InputError, Parts, PolicyVersion, TrainedSince, TrainerError, WeightsRef
from agentrl_tinker import messages
from agentrl_tinker.stability import find_distributions
from agentrl_tinker.tables import (
    EXTERNAL_WEIGHTS,
    SAMPLER_WEIGHTS,
    WEIGHTS,
    ClientModel,
    ClientTables,
    sampler_id_of,
)

T = TypeVar("T")

GRADIENT_TOLERANCE = 1e-3
"""Largest relative difference between the gradient norms of a step and of its repetition after a start."""
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


class ModelTraining:
    """Executes the requests of models, one at a time.

    Args:
        tables: what clients have.
        parts: parts of the run.
        max_models: number of models in memory at once.
        checkpoint_every: steps between checkpoints of a model; 0: none.
    """

    def __init__(self, tables: ClientTables, parts: Parts, *, max_models: int, checkpoint_every: int) -> None:
        self._tables = tables
        self._parts = parts
        self._max_models = max_models
        self._checkpoint_every = checkpoint_every
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="agentrl-trainer")

    async def execute(self, model: ClientModel, request: ClientRequest) -> Outcome:
        """Execute a request of a model, and record the version that it published.

        Raises:
            TrainerError: the model cannot be rebuilt: a repeated step has another gradient than it had, or the
                checkpoint of loaded weights is missing.
        """
        content = messages.read_request(request.route, request.body)
        model.used_at = self._parts.clock.monotonic()
        if model.id not in model.base.learner.loaded:
            await self._call(self._restore, model)
        try:
            outcome = await self._call(self._apply, model, request, content)
        except InputError:
            raise
        except Exception:
            if request.route in ("optim_step", "load_weights"):
                # It may have changed the weights in part; without it, they are rebuilt from the journal.
                await self._call(model.base.learner.unload, model.id)
            raise
        if outcome.weights is not None and outcome.weights != model.newest:
            parent = None if model.newest is None else model.newest.version
            await self._parts.record_version(outcome.weights, parent, model.unpublished)
            model.unpublished = TrainedSince()
        return outcome

    async def keep_checkpoint(self, model: ClientModel, request: ClientRequest) -> None:
        """Write a checkpoint after a finished request if one is due and there is no gradient, which it would lack."""
        every = self._checkpoint_every
        if every and model.steps_since_checkpoint >= every and not model.has_gradient:
            await self._call(self._write_checkpoint, model, request.sequence)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def _call(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    # --- requests -----------------------------------------------------------------------------------------------------

    def _apply(self, model: ClientModel, request: ClientRequest, content: Any) -> Outcome:
        """Execute a request of a model in memory, in the trainer's thread."""
        learner = model.base.learner
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
                learner.save(model.id, self._tables.saved_directory(model, request.sequence))
                path = f"tinker://{model.id}/{WEIGHTS}/{content.path}"
                return Outcome.of({"type": "save_weights", "path": path})
            case messages.SaveForSampler() | messages.SaveExternal():
                if isinstance(content, messages.SaveForSampler):
                    self._tables.check_unused(model, content)
                weights = self._publish(model)
                result: dict[str, Any] = {
                    "type": request.route,
                    "agentrl_version": list(weights.version),
                    "agentrl_step": learner.steps(model.id),
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
        from agentrl_tinker.losses import CLIENT_LOSSES, training_rows

        started = self._parts.clock.monotonic()
        loss = CLIENT_LOSSES[content.loss_fn]
        distributions = find_distributions(self._parts.requests, content.rows) if loss.reads_sampler else None
        result = model.base.learner.forward_backward(
            model.id,
            training_rows(loss, content.rows, distributions),
            functools.partial(loss.function, **content.settings),
            backward=not content.forward_only,
        )
        if not content.forward_only:
            model.has_gradient = True
            past = model.unpublished
            past.rows += len(content.rows)
            past.tokens += sum(len(row.token_ids) for row in content.rows)
            past.loss += result.loss
            past.seconds += self._parts.clock.monotonic() - started
            past.digest = blake2b(past.digest + request.body, digest_size=16).digest()
        return Outcome("protobuf", messages.write_forward_backward(result.logprobs, {"loss:sum": result.loss}))

    def _optim_step(self, model: ClientModel, content: messages.OptimStep) -> float:
        from agentrl.parts import AdamSettings

        adam = msgspec.structs.asdict(content.adam_params)
        max_grad_norm = max(0.0, adam.pop("grad_clip_norm"))
        norm = model.base.learner.step(model.id, AdamSettings(**adam, max_grad_norm=max_grad_norm))
        model.has_gradient = False
        model.steps_since_checkpoint += 1
        model.unpublished.grad_norm = norm
        return norm

    def _load(self, model: ClientModel, content: messages.LoadWeights) -> None:
        # Expiry was checked at acceptance.
        saved = self._tables.saved_of(content.path, WEIGHTS, expired=True)
        directory = self._tables.saved_directory(self._tables.saved_model(saved.path), saved.sequence)
        model.base.learner.replace(model.id, directory, optimizer=content.optimizer)
        model.has_gradient = False

    def _publish(self, model: ClientModel) -> WeightsRef:
        """Publish a model's weights as its next version, unless its newest version has them already."""
        learner = model.base.learner
        if model.newest is None:
            return learner.publish(model.id, PolicyVersion(model.base.policy, model.number, 0))
        if model.newest_step == learner.steps(model.id) and Path(model.newest.path).is_dir():
            return model.newest
        return learner.publish(model.id, model.newest.version._replace(step=model.newest.version.step + 1))

    # --- models in memory ---------------------------------------------------------------------------------------------

    def _make_room(self, model: ClientModel) -> None:
        """Evict other models if a model needs all weights of their base, or if there are too many: those that were used
        least recently."""
        resident = [other for other in self._tables.models.values() if other.id in other.base.learner.loaded]
        leaving = [other for other in resident if model.lora is None and other.base is model.base]
        staying = sorted((other for other in resident if other not in leaving), key=lambda one: one.used_at)
        for other in (*leaving, *staying[: max(0, len(staying) + 1 - self._max_models)]):
            if self._checkpoint_every and other.steps_since_checkpoint and not other.has_gradient:
                self._write_checkpoint(other, other.next_sequence - 1)
            other.base.learner.unload(other.id)

    def _restore(self, model: ClientModel) -> None:
        """Read a model's newest checkpoint, and execute the finished requests since then again."""
        learner = model.base.learner
        self._make_room(model)
        try:
            learner.load(model.id, model.lora, model.seed)
            model.has_gradient = False
            model.unpublished = TrainedSince()
            checkpoint = next(iter(self._checkpoints(model)), None)
            if checkpoint is not None:
                learner.restore(model.id, checkpoint)
                unpublished = (checkpoint / "unpublished.json").read_bytes()
                model.unpublished = msgspec.json.decode(unpublished, type=TrainedSince)
            model.steps_since_checkpoint = 0
            for request in self._repeated(model, -1 if checkpoint is None else int(checkpoint.name)):
                self._repeat(model, request)
        except BaseException:
            learner.unload(model.id)  # one that is rebuilt in part must not serve the next request
            raise

    def _repeat(self, model: ClientModel, request: ClientRequest) -> None:
        """Execute a finished request of a model again."""
        content = messages.read_request(request.route, request.body)
        if isinstance(content, messages.LoadWeights):
            raise TrainerError(
                f"{self._checkpoint(model, request.sequence).parent}: the checkpoint of request {request.sequence}, "
                "which loaded weights, is missing; restore it from a copy"
            )
        if isinstance(content, messages.SaveForSampler | messages.SaveExternal):
            model.unpublished = TrainedSince()
            return
        outcome = self._apply(model, request, content)
        if isinstance(content, messages.OptimStep):
            result = self._parts.requests.result(request.id)
            assert result is not None
            before, now = (json.loads(body)["metrics"]["grad_norm"] for body in (result.body, outcome.body))
            if not math.isclose(before, now, rel_tol=GRADIENT_TOLERANCE, abs_tol=1e-12):
                raise TrainerError(
                    f"{model.id}: the step of request {request.sequence} had a gradient norm of {before:.6g}, and "
                    f"{now:.6g} when it was repeated from the journal; the model's base or the code has changed since"
                )

    def _repeated(self, model: ClientModel, after: int) -> Iterator[ClientRequest]:
        """Yield the finished requests after a sequence number that changed or published the weights, or changed the
        gradient."""
        for request in self._parts.requests.of_subject(model.id, after):
            if request.sequence >= model.next_sequence:
                return
            result = self._parts.requests.result(request.id)
            if request.route in _CHANGES and result is not None and result.kind != "error":
                yield request

    def _write_checkpoint(self, model: ClientModel, sequence: int) -> None:
        """Write a checkpoint of the model after a request, and remove the older ones."""
        extra = {"unpublished.json": msgspec.json.encode(model.unpublished)}
        model.base.learner.save(model.id, self._checkpoint(model, sequence), extra)
        for older in self._checkpoints(model)[1:]:
            self._parts.remove(older)
        model.steps_since_checkpoint = 0
        if model.lora is None:
            self._remove_old_checkpoints(model)

    def _remove_old_checkpoints(self, model: ClientModel) -> None:
        """Remove checkpoints, which are large, of older models with all weights of a base, as long as the journal can
        rebuild them: without loaded weights, whose files may be gone."""
        loaded = {request.subject for request in self._parts.requests.requests("load_weights")}
        others = [other for other in self._tables.models.values() if other.base is model.base and other is not model]
        others.sort(key=lambda other: (other.used_at, other.number))
        keep = self._tables.versions
        for other in others[: max(0, len(others) - keep + 1)] if keep else ():
            for checkpoint in self._checkpoints(other) if other.id not in loaded else ():
                self._parts.remove(checkpoint)

    def _checkpoints(self, model: ClientModel) -> list[Path]:
        """List the checkpoints of a model, the newest first."""
        places = self._checkpoint(model, 0).parent.glob("*")
        return sorted((place for place in places if place.name.isdecimal()), key=lambda place: -int(place.name))

    def _checkpoint(self, model: ClientModel, sequence: int) -> Path:
        return self._parts.directory / "checkpoints" / "models" / str(model.number) / str(sequence)
