"""The policy trainer: all policies of a run that learn, from units by reference to optimizer steps.

One step of one policy: `forward_backward` reads the units of this rank's share, packs their rows, sums the token losses
divided by the batch's constant normalizer and accumulates the gradient; `optim_step` adds the gradients of all ranks,
clips, and applies AdamW. Both are idempotent by step id.

Owns: gradients, step reports and columns. Does not own: a policy's model and optimizer (`learner.py`), version ids, the
choice of units (the orchestrator), processes (`cluster`). Invariants: a step that is refused leaves the weights
bit-identical. A step with a gradient of exactly 0 (no advantages, divergence or entropy bonus) also leaves the
optimizer state; its version has the previous weights, and the metric `zero_gradient` counts it. Frozen policies are not
trained here. The update does not depend on the number of ranks, sharding, micro-batches or rows per unit.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, ParamSpec, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from agentrl.config.plans import TrainerPlan
from agentrl.core.clock import SystemClock
from agentrl.core.custom_functions import BEYOND_EPISODE, FunctionCode
from agentrl.core.errors import NonFiniteError, StorageError, TrainerError
from agentrl.core.files import LOCAL, ReadBytes, read_bytes
from agentrl.core.records import Lines, PolicyVersion, StepReport, TrainBatch, Unit, WeightsRef
from agentrl.core.tokens import TrainingSample
from agentrl.credit.samples import ReadUnits, read_samples, without_stale_tokens
from agentrl.engines.models import native_attention
from agentrl.engines.shared_cores import computing, use_threads
from agentrl.journal.rows import make_unit_reader
from agentrl.learn.device_copies import device_tensors
from agentrl.learn.forward import TOP_TOKENS, HeadOutput, compiles_attention
from agentrl.learn.fused import Kernels, describe_fused, find_kernels, fuse_layers
from agentrl.learn.kernel_check import rows_are_exact, why_compiled_attention_fails
from agentrl.learn.learner import Learner, StepAccumulator
from agentrl.learn.loss_batch import LossBatch, TokenGradients
from agentrl.learn.losses import SUMS, Loss, make_loss, token_metric_sums
from agentrl.learn.memory_prediction import shard_count
from agentrl.learn.models import PolicyModel, load_models, load_references
from agentrl.learn.packing import MicroBatch, pack
from agentrl.learn.publish import CanaryBuilder, Publisher
from agentrl.learn.ranks import (
    RankGroup,
    SingleRankGroup,
    balanced_shares,
    broadcast_from_first_rank,
    equal_shares,
    gather_tensor,
    rank_device,
)
from agentrl.learn.step_columns import TokenColumns
from agentrl.learn.storage import converting_write_errors

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedModel


P = ParamSpec("P")
T = TypeVar("T")

_COUNTS = (
    *("samples", "tokens", "skipped_samples", "row_tokens", "forwarded_tokens", "tree_tokens", "unrouted_tokens"),
    *("lost_routing", "stale_tokens"),
)
_TOKEN_SUMS = ("loss", "entropy", "kept_mass", *SUMS)
_TOTALS = (*_COUNTS, *_TOKEN_SUMS)


class PolicyTrainer:
    """Trains all policies of a run in this process, as one of several ranks or alone."""

    def __init__(
        self,
        plan: TrainerPlan,
        run_directory: Path,
        *,
        ranks: RankGroup | None = None,
        read: ReadUnits | None = None,
        read_file: ReadBytes = read_bytes,
        publishes: bool = True,
        loss: FunctionCode | None = None,
    ) -> None:
        """Store the settings; `start` loads models.

        Args:
            plan: the trainer's part of the run.
            run_directory: directory with journal, versions and step columns.
            ranks: the data-parallel group; None: this process alone.
            read: reads token data; None: from the run's journal.
            read_file: reads the files of a checkpoint.
            publishes: whether versions are published, each with a canary; the trainer then keeps the initial weights'
                answers.
            loss: code of the user's loss that another process found; None: this process finds it.

        Raises:
            ConfigError: there is no such loss, or its options do not fit.
        """
        self._plan = plan
        self._directory = run_directory
        self._ranks: RankGroup = ranks if ranks is not None else SingleRankGroup()
        self._read = read if read is not None else make_unit_reader(run_directory)
        self._read_file = read_file
        self._loss = make_loss(plan.trainer, loss)
        self._publisher = Publisher(run_directory, holds=plan.demand.engine_in_process and ranks is None)
        self._publishes = publishes
        self._unsynced: list[Path] = []
        """Files of steps that no checkpoint has sealed; on rank 0."""
        self._canaries: dict[Path, CanaryBuilder] = {}
        """Canary makers, keyed by base model; empty if this trainer publishes nothing."""
        self._clock = SystemClock()
        self._learners: dict[str, Learner] = {}
        self._references: dict[str, PolicyModel] = {}
        """Frozen reference models, keyed by policy, if the loss reads them and the policy names one."""
        self._kernels: Kernels | None = None
        """Fused functions for layers of the trained models; None: layers are computed as they are."""
        self._prepared: set[int] = set()
        """Ids of the models that `_prepare` has prepared."""

    def start(self, resume_from: Path | None = None) -> tuple[str, ...]:
        """Load the models and, on resume, a checkpoint directory.

        Returns:
            Lines for the user: the layers of each adapter, and whether each policy's rows share their prefixes.

        Raises:
            ModelError: the model cannot be trained.
            ConfigError: an adapter targets a layer that cannot be both trained and served.
            TrainerError: the checkpoint does not fit the configuration.
        """
        torch.set_num_threads(self._plan.threads)
        with converting_write_errors(self._directory):
            self._directory.mkdir(parents=True, exist_ok=True)
        shards = int(self._ranks.gather(str(shard_count(self._plan, self._ranks.size)).encode())[0])
        mesh = self._ranks.mesh(shards) if shards > 1 else None
        device = rank_device(self._ranks.rank, stays_on_cpu=self._plan.demand.stays_on_cpu)
        models = load_models(self._plan, device, mesh)
        if self._loss.needs_reference:
            self._references = load_references(self._plan, models, device, mesh)
        for name, policy in self._plan.policies.items():
            optimizer, steps = self._plan.trainer.optimizer, self._plan.steps[name]
            self._learners[name] = Learner(name, models[name], policy, optimizer, steps=steps)
        if self._publishes and (self._ranks.rank == 0 or mesh is not None):
            for model in models.values():
                if model.base not in self._canaries:
                    self._canaries[model.base] = CanaryBuilder(model, max_context=self._plan.max_context)
        if resume_from is not None:
            for name, learner in self._learners.items():
                state = learner.load(resume_from / name, self._read_file)
                learner.step, learner.version, learner.report = state.step, state.version, state.report
        sharing_lines = [f"{name}: {_sharing_text(model)}" for name, model in models.items()]
        if device.type == "cuda" and mesh is None:
            kernels = find_kernels()
            if isinstance(kernels, str):
                sharing_lines.append(f"norms, rotary embeddings and SwiGLU are not fused: {kernels}")
            else:
                self._kernels = kernels
                sharing_lines.append(
                    "norms, rotary embeddings and SwiGLU: fused by liger-kernel, once the first step has checked them"
                )
        return (*(model.described for model in models.values() if model.described), *sharing_lines)

    def forward_backward(self, batch: TrainBatch) -> None:
        """Accumulate the gradient of a batch; units already accumulated, or an applied step, change nothing.

        A failure in the middle discards everything accumulated for the step.

        Raises:
            TrainerError: the policy does not learn here, or the step is not its next one.
            UntrainableUnitsError: rows of some units cannot be trained; nothing of the batch is accumulated.
            JournalError: a partition cannot be read at all; nothing of the batch is accumulated.
        """
        start_s = self._clock.monotonic()
        learner = self._learner(batch.policy)
        if batch.step_id == learner.step:
            return
        if batch.step_id != learner.step + 1:
            raise TrainerError(f"policy {batch.policy!r} is at step {learner.step}, not before {batch.step_id}")
        step = learner.open or StepAccumulator(batch.step_id)
        units = [unit for unit in batch.units if (unit.episode_id, unit.attempt) not in step.units]
        if step.units and units and self._sees_step:
            raise TrainerError(
                f"policy {batch.policy!r}: the loss {self._loss.name}, or the mean over sequences, needs all units of "
                f"a step at once, and step {batch.step_id} was started without some of them"
            )
        share = self._read_share(learner, batch.lines, units)
        if share is None:
            return
        samples, num_stale = share
        learner.open = step
        step.totals["stale_tokens"] += num_stale
        self._prepare(learner.model)
        step.units.update((unit.episode_id, unit.attempt) for unit in units)
        step.totals["lost_routing"] += sum(sample.lost_routing for sample in samples)
        complete = False
        try:
            with computing():
                self._accumulate(learner, step, samples, batch)
            complete = True
        finally:
            if not complete:  # a partial gradient must never be applied
                learner.discard()
        step.seconds += self._clock.monotonic() - start_s

    def _prepare(self, policy_model: PolicyModel) -> None:
        """Check what a step compiles, and fuse layers, before the first step of a model: both take seconds, in which
        the engine samples. All ranks decide the same."""
        model = policy_model.model
        if id(model) in self._prepared:
            return
        self._prepared.add(id(model))
        policy_model.activate()  # the check's gradient belongs to this policy, which discards it
        if compiles_attention(model.device) and policy_model.shared_prefixes:
            reasons = self._ranks.gather(why_compiled_attention_fails(policy_model).encode())
            if reason := next(filter(None, reasons), b"").decode():
                self._stop_sharing(model, reason)
                warnings.warn(_sharing_text(policy_model), stacklevel=3)
            # Ranks of shards need equally many passes, and each block of padded rows is one.
            elif not policy_model.sharded:
                chooses = rows_are_exact(policy_model)
                for learner in self._learners.values():
                    if learner.model.model is model:
                        learner.model.chooses_sharing = chooses
        if self._kernels is not None:
            layers = fuse_layers(model, self._kernels)
            if layers.refused or not layers.fused:
                warnings.warn(f"{type(model).__name__}: {describe_fused(layers)}", stacklevel=3)

    def _stop_sharing(self, model: PreTrainedModel, reason: str) -> None:
        """Compute rows whole from now on, for all policies on a model and for their references."""
        policies = [name for name, learner in self._learners.items() if learner.model.model is model]
        references = [self._references[name] for name in policies if name in self._references]
        for each in (*(self._learners[name].model for name in policies), *references):
            each.unshared = reason
            each.model.set_attn_implementation(native_attention(each.model))

    def _read_share(
        self, learner: Learner, lines: Lines, units: Sequence[Unit]
    ) -> tuple[list[TrainingSample], int] | None:
        """Read the samples of this rank's share of some units, without tokens that are too old to train; None if
        another rank could not read its share, and raises.

        Shares are contiguous, so that the ranks' rows in rank order are those of a single rank, and balanced by tokens.
        To count the tokens, each rank first reads an equal number of units.

        Returns:
            The samples, and the number of tokens that are too old.

        Raises:
            UntrainableUnitsError, JournalError: see `forward_backward`.
        """
        places = equal_shares(len(units), self._ranks.size)[self._ranks.rank]
        version, max_lag = learner.current, self._plan.policies[learner.name].max_lag
        read_places: dict[int, tuple[list[TrainingSample], int]] = {}

        def read(places: Sequence[int]) -> None:
            found = read_samples([units[place] for place in places], self._read)
            for place, samples in zip(places, found, strict=True):
                read_places[place] = without_stale_tokens(samples, version, max_lag, lines)

        counts_json = b""
        try:
            read(places)
            counts_json = json.dumps(
                [sum(map(self._forwarded_tokens, read_places[place][0])) for place in places]
            ).encode()
        finally:  # the other ranks are waiting, even after an error
            every = self._ranks.gather(counts_json)
        if not all(every):
            return None
        counts = [tokens for message in every for tokens in json.loads(message)]
        places = balanced_shares(counts, self._ranks.size)[self._ranks.rank]
        read([place for place in places if place not in read_places])
        samples = [sample for place in places for sample in read_places[place][0]]
        return samples, sum(read_places[place][1] for place in places)

    def _is_forwarded(self, sample: TrainingSample) -> bool:
        """Whether a row can have a gradient; a row whose advantages are all 0 still counts as consumed."""
        return bool(not self._loss.skips_zeros or sample.advantages.any())

    def _forwarded_tokens(self, sample: TrainingSample) -> int:
        """Return the number of tokens of a row that go through the model, if none are shared."""
        return len(sample.token_ids) if self._is_forwarded(sample) else 0

    @property
    def _sees_step(self) -> bool:
        """Whether a token's loss depends on tokens of other units, so that all units of a step are needed at once."""
        return self._loss.grouping in BEYOND_EPISODE or self._plan.trainer.loss.normalizer == "sequences"

    def _accumulate(
        self, learner: Learner, step: StepAccumulator, samples: Sequence[TrainingSample], batch: TrainBatch
    ) -> None:
        """Run samples through the model in micro-batches, and add their gradient and sums to the step.

        The loss is evaluated on leaves (`LossBatch.of`); its derivatives then enter the model's graph as the gradients
        of the model's outputs, so that forward and backward pass need only one micro-batch at a time.
        """
        group_size, totals = self._plan.credit.group_size, step.totals
        columns = TokenColumns.of(samples, learner.current, batch.lines, group_size=group_size)
        step.columns.append(columns)
        weights = self._token_weights(columns, batch.normalizer)
        totals["samples"] += len(samples)
        totals["tokens"] += len(columns)
        learner.model.activate()
        if self._loss.grouping != "token":
            token_losses = self._accumulate_whole_step(learner, step, samples, columns, weights)
        else:
            token_losses = self._accumulate_by_token(learner, step, samples, columns, weights)
        if step.suspect is None and not np.isfinite(token_losses).all():
            wrong = int(np.flatnonzero(~np.isfinite(token_losses))[0])
            step.suspect = samples[int(np.searchsorted(columns.starts, wrong, side="right")) - 1].episode_id

    def _accumulate_by_token(
        self,
        learner: Learner,
        step: StepAccumulator,
        samples: Sequence[TrainingSample],
        columns: TokenColumns,
        weights: NDArray[np.float32],
    ) -> NDArray[np.float32]:
        """Accumulate a loss whose derivatives for a token depend on the outputs for that token alone: forward pass,
        loss and backward pass of one micro-batch after another. Returns the loss of each token, [n]."""
        sample_indices = [index for index, sample in enumerate(samples) if self._is_forwarded(sample)]
        step.totals["skipped_samples"] += len(samples) - len(sample_indices)
        outputs = _StepOutputs(len(columns))
        for part in self._forward_parts(
            learner, samples, columns, sample_indices, backward=True, reference=self._loss.needs_reference
        ):
            batch = LossBatch.of(columns.take(part.tokens), part.head, part.reference, weights[part.tokens])
            assert batch.weights is not None
            gradients = self._loss.evaluate(batch, batch.weights)
            outputs.add(part.tokens, (batch.logprobs, batch.entropies, gradients.loss, part.head.kept_mass))
            outputs.add_sums(token_metric_sums(batch, gradients, batch.weights))
            self._count_forward(step, part.micro_batch, samples, sample_indices)
            self._backward(part, gradients.derivatives)
        return self._add_outputs(step, outputs, columns, sample_indices)

    def _accumulate_whole_step(
        self,
        learner: Learner,
        step: StepAccumulator,
        samples: Sequence[TrainingSample],
        columns: TokenColumns,
        weights: NDArray[np.float32],
    ) -> NDArray[np.float32]:
        """Accumulate a loss whose derivatives for a token depend on the outputs for other tokens: they are computed for
        the whole step first. Returns the loss of each token, [n]."""
        gradients = self._evaluate_whole_step(learner, step, samples, columns, weights)
        derivatives = gradients.derivatives
        sample_indices = [
            index
            for index, (start, stop) in enumerate(pairwise(columns.starts.tolist()))
            if any(bool(derivative[start:stop].any()) for derivative in derivatives)
        ]
        step.totals["skipped_samples"] += len(samples) - len(sample_indices)
        for part in self._forward_parts(
            learner, samples, columns, sample_indices, backward=True, reference=self._loss.mark.divergence
        ):
            arrays = {str(index): column.numpy()[part.tokens] for index, column in enumerate(derivatives)}
            self._backward(part, [*device_tensors(arrays, part.head.logprob.device).values()])
        return gradients.loss.numpy()

    def _forward_parts(
        self,
        learner: Learner,
        samples: Sequence[TrainingSample],
        columns: TokenColumns,
        sample_indices: Sequence[int],
        *,
        backward: bool,
        reference: bool,
    ) -> Iterator[_ForwardedPart]:
        """Yield the outputs of the model, and of its reference where it is needed, for one micro-batch after another;
        without `backward`, they have no graph."""
        for micro_batch in self._micro_batches(
            learner, samples, sample_indices, backward=backward, reference=reference
        ):
            use_threads(self._plan.threads)
            reference_head = self._reference(learner, micro_batch) if reference else None
            with torch.set_grad_enabled(backward):
                entropy_gradient = backward and self._loss.uses_entropy
                head = self._forward(learner, micro_batch, reference_head, entropy_gradient=entropy_gradient)
            tokens = columns.tokens_of(_members(micro_batch, sample_indices))
            yield _ForwardedPart(micro_batch, tokens, head, reference_head)

    @staticmethod
    def _backward(part: _ForwardedPart, derivatives: Sequence[Tensor]) -> None:
        """Run the backward pass of a part from the derivatives of the loss by its log-probabilities, entropies and
        divergences."""
        head = part.head
        pairs = zip((head.logprob, head.entropy, head.reference_kl), derivatives, strict=True)
        live = [(output, by) for output, by in pairs if output is not None and output.requires_grad]
        torch.autograd.backward([output for output, _ in live], [by for _, by in live])

    @staticmethod
    def _add_outputs(
        step: StepAccumulator, outputs: _StepOutputs, columns: TokenColumns, sample_indices: Sequence[int]
    ) -> NDArray[np.float32]:
        """Add the micro-batches' results to the step; returns the loss of each token."""
        columns_of_outputs = outputs.gather(4)
        logprobs, entropies = columns_of_outputs[:2]
        token_losses: NDArray[np.float32] = columns_of_outputs[2]
        sums = [column.sum(dtype=np.float64) for column in (token_losses, entropies, columns_of_outputs[3])]
        for name, value in zip(_TOKEN_SUMS, [*sums, *outputs.gather_sums()], strict=True):
            step.totals[name] += float(value)
        columns.record(columns.tokens_of(sample_indices), logprobs, entropies)
        return token_losses

    def _token_weights(self, columns: TokenColumns, normalizer: float) -> NDArray[np.float32]:
        """Return the loss weight of each token, [n], over the whole step and all ranks."""
        count = len(columns)
        if self._plan.trainer.loss.normalizer != "sequences":
            return np.full(count, 1.0 / normalizer, np.float32)
        lengths = np.bincount(columns.agent) if count else np.zeros(0, np.int64)
        total = sum(map(int, self._ranks.gather(str(len(lengths)).encode())))
        weights: NDArray[np.float32] = (1.0 / (float(total) * lengths[columns.agent])).astype(np.float32)
        return weights

    def _evaluate_whole_step(
        self,
        learner: Learner,
        step: StepAccumulator,
        samples: Sequence[TrainingSample],
        columns: TokenColumns,
        weights: NDArray[np.float32],
    ) -> TokenGradients:
        """Evaluate the loss of a whole step; return its derivatives for the tokens of this rank.

        The log-probabilities come from a separate forward pass, because the derivative for one token may depend on the
        log-probability of every other.
        """
        needs_reference, diverges = self._loss.needs_reference, self._loss.mark.divergence
        names = ("logprobs", "entropies", *["reference_logprobs"] * needs_reference, *["reference_kl"] * diverges)
        sample_indices, outputs = list(range(len(samples))), _StepOutputs(len(columns))
        for part in self._forward_parts(
            learner, samples, columns, sample_indices, backward=False, reference=needs_reference
        ):
            head = part.head
            reference_logprob = None if part.reference is None else part.reference.logprob
            parts = (head.kept_mass, head.logprob, head.entropy, reference_logprob, head.reference_kl)
            outputs.add(part.tokens, [column for column in parts if column is not None])
            self._count_forward(step, part.micro_batch, samples, sample_indices)
        kept_mass, *model_values = outputs.gather(1 + len(names))
        model_columns = dict(zip(names, model_values, strict=True))
        step.totals["kept_mass"] += float(kept_mass.sum(dtype=np.float64))
        columns.record(np.arange(len(columns)), model_columns["logprobs"], model_columns["entropies"])
        all_columns, tokens_here = replace(columns, computed=model_columns | {"weights": weights}), slice(len(columns))
        if self._loss.grouping in BEYOND_EPISODE:  # else the other ranks' tokens change nothing for these
            all_columns = TokenColumns.merge(list(map(TokenColumns.decode, self._ranks.gather(all_columns.encode()))))
            tokens_here = slice(*self._token_range(len(columns)))
        every = {name: torch.from_numpy(all_columns.computed[name]) for name in (*names, "weights")}
        batch = LossBatch(
            all_columns,
            logprobs=every["logprobs"].requires_grad_(),
            entropies=every["entropies"].requires_grad_(),
            reference_logprobs=every.get("reference_logprobs"),
            reference_kl=every["reference_kl"].requires_grad_() if diverges else None,
        )
        all_gradients = self._loss.evaluate(batch, every["weights"])
        gradients = TokenGradients(*(column[tokens_here] for column in all_gradients))
        mine = LossBatch(
            columns,
            logprobs=torch.from_numpy(model_columns["logprobs"]),
            entropies=torch.from_numpy(model_columns["entropies"]),
            reference_logprobs=None
            if "reference_logprobs" not in model_columns
            else every["reference_logprobs"][tokens_here],
        )
        step.totals["loss"] += float(gradients.loss.sum())
        step.totals["entropy"] += float(model_columns["entropies"].sum())
        for name, value in zip(
            SUMS, token_metric_sums(mine, gradients, torch.from_numpy(weights)).tolist(), strict=True
        ):
            step.totals[name] += value
        return gradients

    def _token_range(self, count: int) -> tuple[int, int]:
        """Return start and stop of this rank's tokens among those of all ranks."""
        counts = [int.from_bytes(reply, "little") for reply in self._ranks.gather(count.to_bytes(8, "little"))]
        before = sum(counts[: self._ranks.rank])
        return before, before + count

    def _micro_batches(
        self,
        learner: Learner,
        samples: Sequence[TrainingSample],
        sample_indices: Sequence[int],
        *,
        backward: bool,
        reference: bool,
    ) -> Iterator[MicroBatch]:
        """Yield the micro-batches of this rank; each must be computed before the next is requested.

        The ranks of a sharded model compute the same number: a rank with fewer adds rows without loss after its own.

        Args:
            learner: learner whose model computes them.
            samples: samples of this rank.
            sample_indices: indices of the samples to pack.
            backward: whether each is computed forward and backward.
            reference: whether the reference is computed for each, first.
        """
        limit, share_prefixes = self._plan.trainer.micro_batch_tokens, learner.model.sharing
        batches = pack(
            [samples[index] for index in sample_indices],
            max_tokens=limit,
            share=share_prefixes,
            one_pass=learner.model.sharded,
        )
        if not learner.model.sharded:
            yield from batches
            return
        batches_here = list(batches)
        every = [int(count) for count in self._ranks.gather(str(len(batches_here)).encode())]
        yield from batches_here
        for _ in range(max(every) - len(batches_here)):
            (blank,) = pack([_BLANK], max_tokens=limit, share=share_prefixes)
            reference_head = self._reference(learner, blank) if reference else None
            with torch.set_grad_enabled(backward):
                head = self._forward(learner, blank, reference_head, entropy_gradient=False)
            if backward:
                head.logprob.sum().mul(0.0).backward()

    def _forward(
        self, learner: Learner, micro_batch: MicroBatch, reference: HeadOutput | None, *, entropy_gradient: bool
    ) -> HeadOutput:
        model, reference_head = learner.model, reference if self._loss.mark.divergence else None
        return model.token_logprobs(
            micro_batch,
            entropy_gradient=entropy_gradient,
            replay=model.replay,
            reference=reference_head,
        )

    def _reference(self, learner: Learner, micro_batch: MicroBatch) -> HeadOutput:
        """Compute the outputs of the policy's reference, or of the base under its adapter, with the experts that the
        reference itself chooses: the recorded ones are the policy's."""
        reference, top = self._references.get(learner.name), TOP_TOKENS if self._loss.mark.divergence else 0
        with torch.no_grad():
            if reference is not None:
                return reference.token_logprobs(micro_batch, top=top)
            with learner.model.as_reference():
                return learner.model.token_logprobs(micro_batch, top=top)

    @staticmethod
    def _count_forward(
        step: StepAccumulator, micro_batch: MicroBatch, samples: Sequence[TrainingSample], sample_indices: Sequence[int]
    ) -> None:
        step.totals["row_tokens"] += sum(
            len(samples[index].token_ids) for index in _members(micro_batch, sample_indices)
        )
        step.totals["forwarded_tokens"] += len(micro_batch.token_ids)
        step.totals["tree_tokens"] += len(micro_batch.token_ids) * micro_batch.is_tree
        step.totals["unrouted_tokens"] += micro_batch.unrouted_tokens

    def optim_step(self, policy: str, step_id: int) -> StepReport:
        """Apply the accumulated gradient; repeating the last applied step id returns its report.

        A step whose gradient is exactly 0, as without units, leaves weights and optimizer unchanged.

        Raises:
            NonFiniteError: loss or gradient is not finite; it is discarded, and weights and optimizer are unchanged.
            StorageError: the step's columns could not be written; as with `NonFiniteError`, on every rank.
            TrainerError: nothing was accumulated for this step.
        """
        start_s = self._clock.monotonic()
        learner = self._learner(policy)
        if learner.report is not None and learner.report.step_id == step_id:
            return learner.report
        step = learner.open
        if step is None or step.step_id != step_id:
            raise TrainerError(f"policy {policy!r} is at step {learner.step} with no gradient for step {step_id}")
        total, grad_norm = self._sum_over_ranks(learner, step)
        if not (math.isfinite(total["loss"]) and math.isfinite(grad_norm)):
            learner.discard()
            suspects = [reply.decode() for reply in self._ranks.gather((step.suspect or "").encode())]
            suspect = next(filter(None, suspects), None)
            where = f"; the first such loss was in episode {suspect}" if suspect is not None else ""
            raise NonFiniteError(
                f"policy {policy!r}, step {step_id}: the loss {self._loss.name} is {total['loss']}, the gradient norm "
                f"{grad_norm}{where}. The step was skipped, its episodes are dropped as `nonfinite_gradient`, and the "
                f"weights are as before; {self._loss.how_to_inspect}"
            )
        # Write before the weights change, because this may fail.
        columns, merged_columns = self._write_columns(learner, step)
        self._publisher.withdraw(policy)
        learner.apply(learner.rate(step_id), grad_norm)
        report = StepReport(
            step_id=step_id,
            policy=policy,
            started_from=learner.current,
            loss=total["loss"],
            grad_norm=grad_norm,
            samples=int(total["samples"]),
            tokens=int(total["tokens"]),
            seconds=step.seconds + self._clock.monotonic() - start_s,
            metrics=_metrics(
                total,
                self._loss,
                learning_rate=learner.rate(step_id),
                routed=learner.model.replay is not None,
                masks=self._plan.policies[policy].max_lag is not None,
            )
            | {"zero_gradient": float(grad_norm == 0.0)}
            | {"shares_prefixes": _tree_share(total, learner.model)}
            | merged_columns.mismatch(),
            input_digest=merged_columns.input_digest,
            columns=columns,
        )
        learner.discard()
        learner.step, learner.report = step_id, report
        return report

    def _sum_over_ranks(self, learner: Learner, step: StepAccumulator) -> tuple[dict[str, float], float]:
        """Sum the token sums over all ranks, and clip the gradient; returns the sums and the norm before clipping."""
        gradients = learner.gradients()  # also of sharded weights: AdamW steps over those without one
        if learner.model.sharded:  # FSDP has already summed them in every backward pass
            gradients = []
        if gradients:
            self._ranks.sum(gradients)
        totals = np.array([step.totals[name] for name in _TOTALS], np.float64)
        totals = np.sum([np.frombuffer(each) for each in self._ranks.gather(totals.tobytes())], axis=0)
        norm = torch.nn.utils.clip_grad_norm_(learner.model.parameters.values(), learner.max_grad_norm)
        return dict(zip(_TOTALS, totals.tolist(), strict=True)), float(gather_tensor(norm))

    def _write_columns(self, learner: Learner, step: StepAccumulator) -> tuple[str, TokenColumns]:
        """Write the step's file on rank 0; returns its path in the run and the rows of all ranks.

        Raises:
            StorageError: writing failed; the gradient is discarded on every rank.
        """
        columns = step.columns or [TokenColumns.of([], learner.version, group_size=1)]
        parts = self._ranks.gather(TokenColumns.merge(columns).encode())
        merged_columns = TokenColumns.merge(list(map(TokenColumns.decode, parts)))
        path = f"steps/{learner.name}/{learner.version.lineage}.{step.step_id}.safetensors"

        def write() -> bytes:
            if self._ranks.rank == 0:
                _write_atomically(self._directory / path, merged_columns.encode_file())
                self._unsynced.append(self._directory / path)
            return b""

        try:
            broadcast_from_first_rank(self._ranks, write)  # no rank steps unless rank 0 has written the columns
        except StorageError:
            learner.discard()
            raise
        return path, merged_columns

    def publish(self, policy: str, version: PolicyVersion) -> WeightsRef:
        """Write the policy's weights as an immutable version; later steps start from it. All ranks must publish.

        Raises:
            TrainerError: the version does not match the policy's step, or exists with other weights.
            StorageError: writing failed.
        """
        learner = self._learner(policy)
        if (version.policy, version.step) != (policy, learner.step):
            raise TrainerError(f"policy {policy!r} is at step {learner.step} and cannot be published as {version}")

        def write() -> bytes:
            maker = self._canaries.get(learner.model.base)
            canary = None if maker is None else maker.of(learner.model)
            if self._ranks.rank == 0:
                return msgspec.json.encode(self._publisher.publish(version, learner.model, canary))
            if learner.model.sharded:
                deque(learner.model.publication.tensors(), maxlen=0)
            return b""

        learner.published = msgspec.json.decode(broadcast_from_first_rank(self._ranks, write), type=WeightsRef)
        learner.version = version
        return learner.published

    def discard(self, policy: str) -> None:
        """Discard the gradient accumulated for the policy's next step."""
        self._learner(policy).discard()

    def only_in_checkpoints(self, policy: str) -> bool:
        """Whether only checkpoints hold all that is trained, because versions are rounded."""
        return bool(self._learner(policy).model.publication.inexact_because)

    def recompute(
        self,
        batch: TrainBatch,
        started_from: PolicyVersion,
        weights: WeightsRef | Path | None,
        between: Sequence[tuple[TrainBatch, float]] = (),
    ) -> tuple[float, float]:
        """Recompute loss and gradient norm (before clipping) of a step of the run; writes nothing.

        With one rank, on the machine that trained, the result is bit-identical; several ranks add the numbers in
        another order.

        Args:
            batch: the step's units.
            started_from: the version whose `weights` are given.
            weights: published weights, or a policy's folder in a checkpoint; None: the initial weights of the run.
            between: the steps between `started_from` and this one, oldest first, each with its learning rate; they are
                applied.

        Raises:
            ModelError: the weights were rounded when they were published.
            EngineError, TrainerError: the files of the weights are damaged, or belong to another configuration.
            JournalError: the units cannot be read.
        """
        learner = self._learner(batch.policy)
        self._publisher.withdraw(batch.policy)
        learner.discard()
        learner.step, learner.version, learner.report = started_from.step, started_from, None
        if isinstance(weights, WeightsRef):
            learner.model.publication.load(weights)
        elif weights is not None:
            learner.load(weights)
        for earlier, rate in between:
            _, grad_norm = self._loss_and_norm(learner, earlier)
            learner.apply(rate, grad_norm)
            learner.discard()
            learner.step = earlier.step_id
        result = self._loss_and_norm(learner, batch)
        learner.discard()
        return result

    def _loss_and_norm(self, learner: Learner, batch: TrainBatch) -> tuple[float, float]:
        """Accumulate a batch; return its loss and gradient norm. The clipped gradient stays on the parameters."""
        self.forward_backward(batch)
        if learner.open is None:
            raise TrainerError(f"policy {batch.policy!r}: step {batch.step_id} was not accumulated")
        total, grad_norm = self._sum_over_ranks(learner, learner.open)
        return total["loss"], grad_norm

    def save(self, directory: Path) -> None:
        """Write every policy's state into an empty directory, one folder each. All ranks must call this; rank 0 writes.

        Raises:
            TrainerError: a step is in progress: its gradient is not part of a checkpoint.
            StorageError: writing failed.
        """
        for name, learner in self._learners.items():
            if learner.open is not None:
                raise TrainerError(f"policy {name!r}: step {learner.open.step_id} is in progress; finish it first")
            broadcast_from_first_rank(self._ranks, partial(self._save, learner, directory / name))
        broadcast_from_first_rank(self._ranks, self._sync_columns)

    def _save(self, learner: Learner, directory: Path) -> bytes:
        learner.save(directory, writes=self._ranks.rank == 0)
        return b""

    def _sync_columns(self) -> bytes:
        """Sync the files of the steps that a checkpoint seals."""
        paths, self._unsynced = self._unsynced, []
        with converting_write_errors(self._directory):
            for path in (*paths, *{folder for file in paths for folder in file.parents[:3]}):
                with contextlib.suppress(FileNotFoundError):  # it was pruned
                    LOCAL.sync(path)
        return b""

    def _learner(self, policy: str) -> Learner:
        learner = self._learners.get(policy)
        if learner is None:
            names = ", ".join(sorted(self._learners)) or "none before start"
            raise TrainerError(f"no trained policy {policy!r}; there are: {names}")
        return learner


def _write_atomically(path: Path, data: bytes) -> None:
    """Write a step's file; `save` syncs it.

    Raises:
        StorageError: writing failed.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with converting_write_errors(path):
        # Create only these two directories: a moved run must not be recreated at its old path.
        for folder in (path.parent.parent, path.parent):
            folder.mkdir(exist_ok=True)
        try:
            partial.write_bytes(data)
            partial.rename(path)
        finally:
            partial.unlink(missing_ok=True)


class _ForwardedPart(NamedTuple):
    """A micro-batch with the outputs of the model for its tokens."""

    micro_batch: MicroBatch
    tokens: NDArray[np.int64]
    """Indices of its tokens among those of the step, [n]."""
    head: HeadOutput
    reference: HeadOutput | None


class _StepOutputs:
    """Columns that a step's micro-batches compute, on the device until all are computed: the host waits once."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._order: list[NDArray[np.int64]] = []
        self._columns: list[Tensor] = []
        self._sums: list[Tensor] = []

    def add(self, tokens: NDArray[np.int64], columns: Sequence[Tensor]) -> None:
        """Add the columns of some tokens, [n] each."""
        self._order.append(tokens)
        self._columns.append(torch.stack([column.detach().float() for column in columns]))

    def add_sums(self, sums: Tensor) -> None:
        """Add sums over the tokens of a micro-batch."""
        self._sums.append(sums)

    def gather(self, count: int) -> NDArray[np.float32]:
        """Return `count` columns of all tokens, [count, tokens], 0 where none was computed."""
        columns = np.zeros((count, self._tokens), np.float32)
        if self._columns:
            columns[:, np.concatenate(self._order)] = torch.cat(self._columns, dim=1).cpu().numpy()
        return columns

    def gather_sums(self) -> list[float]:
        """Return the sums of `token_metric_sums` over all micro-batches."""
        sums: list[float] = torch.stack(self._sums).sum(dim=0).tolist() if self._sums else [0.0] * len(SUMS)
        return sums


def _sharing_text(model: PolicyModel) -> str:
    """Say whether rows share their prefixes, and why not."""
    if model.shared_prefixes:
        return "shared prefixes are computed once"
    return f"every row is computed whole, and prefixes are not shared, because of {model.unshared}"


def _tree_share(total: Mapping[str, float], model: PolicyModel) -> float:
    """Return the share of forwarded tokens that were computed in prefix trees; of none, whether they would be."""
    tokens = total["forwarded_tokens"]
    return total["tree_tokens"] / tokens if tokens else float(model.shared_prefixes)


def _metrics(
    total: Mapping[str, float], loss: Loss, *, learning_rate: float, routed: bool, masks: bool
) -> dict[str, float]:
    """Compute a step's metrics from its sums over all ranks."""
    metrics = {
        "learning_rate": learning_rate,
        "skipped_samples": total["skipped_samples"],
        "forwarded_tokens": total["forwarded_tokens"],
        "sharing": total["row_tokens"] / total["forwarded_tokens"] if total["forwarded_tokens"] else 1.0,
        **loss_metrics(total, loss),
    }
    if total["tokens"]:
        metrics["measured_share"] = total["measured_tokens"] / total["tokens"]
    if num_tokens := total["measured_tokens"]:
        metrics |= {"entropy": total["entropy"] / num_tokens, "kept_mass": total["kept_mass"] / num_tokens}
    if masks:
        metrics["staleness/masked"] = total["stale_tokens"] / max(total["stale_tokens"] + total["tokens"], 1.0)
    if routed:
        metrics["lost_routing"] = total["lost_routing"]
        if total["forwarded_tokens"]:
            metrics["unrouted_share"] = total["unrouted_tokens"] / total["forwarded_tokens"]
    return metrics


def loss_metrics(total: Mapping[str, float], loss: Loss) -> Mapping[str, float]:
    """Compute means per trained token from the totals of `losses.token_metric_sums`, by name.

    Returns:
        `k3` (the k3 estimate of KL(mu || pi), Schulman 2020), `abs_logprob_difference`, `mean_ratio`, and
        `effective_sample_fraction` = (sum w)² / (n · sum w²); `masked_fraction` and `truncated_fraction`, unless the
        loss weighs tokens by a reference and not by their advantage; `reference_kl`, the mean of log pi - log ref,
        where there is a reference; empty without tokens.
    """
    count = total["measured_tokens"]
    if not count:
        return {}
    num_tokens = total["reference_tokens"]
    metrics = {"reference_kl": total["reference_kl"] / num_tokens} if num_tokens else {}
    if not loss.mark.reference:
        metrics |= {f"{name}_fraction": total[name] / count for name in ("masked", "truncated")}
    return metrics | {
        "k3": total["k3"] / count,
        "abs_logprob_difference": total["abs_logprob_difference"] / count,
        "mean_ratio": total["ratio"] / count,
        "effective_sample_fraction": total["ratio"] ** 2 / (count * total["ratio_squared"]),
    }


def _members(batch: MicroBatch, sample_indices: Sequence[int]) -> list[int]:
    """Return the indices of the samples in a micro-batch packed from `sample_indices`, in its order."""
    return [sample_indices[index] for index in batch.members]


_BLANK = TrainingSample(
    token_ids=np.zeros(2, np.int32),
    loss_mask=np.array([False, True]),
    logprobs=np.zeros(2, np.float32),
    advantages=np.zeros(2, np.float32),
)
"""Row without trained tokens."""


class InProcessTrainer:
    """`core.ports.Trainer` in this process: a `PolicyTrainer` in a worker thread, so the event loop never waits.

    Calls run one at a time, in order; only `send` runs in parallel. torch releases the interpreter lock in its kernels.
    `cluster.trainer_pool` implements the same port over Ray.
    """

    def __init__(self, plan: TrainerPlan, run_directory: Path, *, read: ReadUnits | None = None) -> None:
        self._trainer = PolicyTrainer(plan, run_directory, read=read)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")

    async def _call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await asyncio.wrap_future(self._thread.submit(function, *args, **kwargs))

    async def start(self, resume_from: str | None = None) -> tuple[str, ...]:
        return await self._call(self._trainer.start, None if resume_from is None else Path(resume_from))

    async def forward_backward(self, batch: TrainBatch) -> None:
        await self._call(self._trainer.forward_backward, batch)

    async def optim_step(self, policy: str, step_id: int) -> StepReport:
        return await self._call(self._trainer.optim_step, policy, step_id)

    async def publish(self, policy: str, version: PolicyVersion) -> WeightsRef:
        return await self._call(self._trainer.publish, policy, version)

    async def save(self, directory: str) -> None:
        await self._call(self._trainer.save, Path(directory))

    async def close(self) -> None:
        """Let the calls in progress end, then stop the threads. Idempotent."""
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)
