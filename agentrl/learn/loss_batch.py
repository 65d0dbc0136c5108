"""The input of a loss: the trained tokens of a step as flat columns, and ids that group the tokens.

`TokenColumns` holds the columns that are known before any forward pass, as numpy arrays; `LossBatch` adds the model's
outputs, as tensors. Ids are dense integers from 0, so that a mean over a conversation is one `index_add`.

Owns: the columns, their exchange between ranks, means and sums over ids. Does not own: the formulas (`losses.py`), the
forward pass, the normalizer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from safetensors.numpy import load, save
from torch import Tensor

from agentrl.core import ids
from agentrl.credit.samples import token_lags, trained_positions
from agentrl.learn.device_copies import device_tensors

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from agentrl.core.records import PolicyVersion, TrainingSample
    from agentrl.learn.forward import HeadOutput

LOG_RATIO_LIMIT = 20.0
"""Bound on |log w|, so that no recorded value can overflow the ratio."""

Id = Literal["row", "turn", "agent", "episode", "seat", "group"]
IDS: tuple[Id, ...] = ("row", "turn", "agent", "episode", "seat", "group")
_GLOBAL_IDS: tuple[Id, ...] = ("seat", "group")
"""Ids that rows of several ranks may have in common; an episode is always on one rank."""
_COLUMNS = ("behavior_logprobs", "advantages", "lags", *IDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenColumns:
    """The trained tokens of some samples, n in all, sample after sample."""

    behavior_logprobs: NDArray[np.float32]  # [n]
    advantages: NDArray[np.float32]  # [n]
    lags: NDArray[np.int32]  # [n], -1: unknown
    row: NDArray[np.int64]  # [n] each, dense from 0
    turn: NDArray[np.int64]
    agent: NDArray[np.int64]
    episode: NDArray[np.int64]
    seat: NDArray[np.int64]
    group: NDArray[np.int64]
    names: dict[str, list[str]]
    """Names of the seats and groups, indexed by their id."""
    starts: NDArray[np.int64]  # [samples + 1], where each sample's tokens begin

    @staticmethod
    def of(samples: Sequence[TrainingSample], version: PolicyVersion, *, group_size: int) -> TokenColumns:
        """Make the columns of samples, to be trained by the weights of `version`."""
        positions = trained_positions(samples)
        counts = [len(at) for at in positions]
        names: dict[Id, list[tuple[object, ...]]] = {name: [] for name in IDS}
        for sample, at in zip(samples, positions, strict=True):
            agent = (sample.episode_id, sample.seat, sample.agent)
            turns = np.zeros(len(at), int) if sample.turn_index is None else sample.turn_index[at]
            names["turn"] += ((*agent, int(turn)) for turn in turns)
            keys: dict[Id, tuple[object, ...]] = {
                "row": (sample.episode_id, sample.row_index),
                "agent": agent,
                "episode": (sample.episode_id,),
                "seat": (sample.seat,),
                "group": (ids.group_id_of(sample.episode_id or "e0", group_size),),
            }
            for name, key in keys.items():
                names[name] += [key] * len(at)
        # Sorted, so that the ids of an agent's turns ascend in time: a row may hold later turns than the next.
        keys_of = {name: sorted(set(names[name])) if name == "turn" else dict.fromkeys(names[name]) for name in IDS}
        numbers = {name: {key: index for index, key in enumerate(keys_of[name])} for name in IDS}
        id_columns = {name: np.array([numbers[name][key] for key in names[name]], np.int64) for name in IDS}

        def take(columns: Sequence[NDArray[Any]], kind: Any) -> NDArray[Any]:
            parts = [column[at] for column, at in zip(columns, positions, strict=True)]
            values: NDArray[Any] = np.concatenate([np.empty(0, kind), *parts]).astype(kind)
            return values

        return TokenColumns(
            behavior_logprobs=take([sample.behavior_logprobs for sample in samples], np.float32),
            advantages=take([sample.advantages for sample in samples], np.float32),
            lags=take([token_lags(sample, version) for sample in samples], np.int32),
            names={name: [str(key[0]) for key in numbers[name]] for name in _GLOBAL_IDS},
            starts=np.cumsum([0, *counts], dtype=np.int64),
            **id_columns,
        )

    def __len__(self) -> int:
        return len(self.row)

    def tokens_of(self, members: Sequence[int]) -> NDArray[np.int64]:
        """Return the indices of the tokens of some samples, in the order of the samples."""
        parts = [np.arange(self.starts[member], self.starts[member + 1]) for member in members]
        return np.concatenate([np.empty(0, np.int64), *parts])

    def take(self, tokens: NDArray[np.int64]) -> TokenColumns:
        """Return the columns of some tokens, with unchanged ids."""
        columns = {name: getattr(self, name)[tokens] for name in _COLUMNS}
        return TokenColumns(**columns, names=self.names, starts=np.array([0, len(tokens)]))

    def encode(self, model_columns: dict[str, NDArray[np.float32]]) -> bytes:
        """Serialize the columns, with columns that the model computed, for the other ranks."""
        columns = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "names"}
        name_bytes = np.frombuffer(json.dumps(self.names).encode(), np.uint8)
        return save(
            {**columns, **{f"computed_{name}": value for name, value in model_columns.items()}, "names": name_bytes}
        )

    @staticmethod
    def merge(parts: Sequence[bytes]) -> tuple[TokenColumns, dict[str, NDArray[np.float32]]]:
        """Merge the results of `encode`, one per rank, in rank order."""
        tables = [load(part) for part in parts]
        names = [json.loads(part["names"].tobytes()) for part in tables]
        columns = {name: np.concatenate([part[name] for part in tables]) for name in tables[0] if name != "names"}
        all_names: dict[str, list[str]] = {}
        for kind in _GLOBAL_IDS:
            all_names[kind] = list(dict.fromkeys(name for table in names for name in table[kind]))
            number = {name: index for index, name in enumerate(all_names[kind])}
            id_columns = [
                np.array([number[name] for name in table[kind]], np.int64)[part[kind]]
                for part, table in zip(tables, names, strict=True)
                if len(part[kind])
            ]
            columns[kind] = np.concatenate([np.empty(0, np.int64), *id_columns])
        for kind in IDS:
            if kind not in _GLOBAL_IDS:
                sizes = [int(part[kind].max()) + 1 if len(part[kind]) else 0 for part in tables]
                before = np.cumsum([0, *sizes[:-1]])
                columns[kind] = np.concatenate([part[kind] + at for part, at in zip(tables, before, strict=True)])
        lengths = np.concatenate([np.diff(part["starts"]) for part in tables])
        columns["starts"] = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        model_columns = {
            name.removeprefix("computed_"): columns.pop(name) for name in list(columns) if "computed_" in name
        }
        return TokenColumns(**columns, names=all_names), model_columns


class LossBatch:
    """The trained tokens of one optimizer step of one policy, as columns of shape [n].

    A loss returns the loss of each token. Ids group the tokens: `batch.mean(values, "agent")` is, for each token, the
    mean over its conversation. Of the columns only `logprobs`, `entropies` and `reference_kl` carry a gradient.

    Example:
        A sequence-level ratio (GSPO) is `batch.mean(batch.log_ratio, "agent").exp()`.
    """

    def __init__(
        self,
        columns: TokenColumns,
        *,
        logprobs: Tensor,
        entropies: Tensor,
        reference_logprobs: Tensor | None = None,
        reference_kl: Tensor | None = None,
        weights: NDArray[np.float32] | None = None,
    ) -> None:
        self.logprobs = logprobs
        """log pi of each token under the trained weights."""
        self.entropies = entropies
        """Entropy in nats of the distribution of each token, under the trained weights."""
        arrays: dict[str, NDArray[Any]] = {name: getattr(columns, name) for name in _COLUMNS}
        device_arrays = device_tensors(arrays if weights is None else arrays | {"weights": weights}, logprobs.device)
        self.behavior_logprobs = device_arrays["behavior_logprobs"]
        """log mu of each token, recorded when it was sampled, under the version that sampled it."""
        self.reference_logprobs = reference_logprobs
        """Log-probabilities of the reference, or of the base model under the adapter; None unless the loss is marked
        with `reference`."""
        self.reference_kl = reference_kl
        """KL(pi || ref) of the distribution of each token, in nats: exact over the reference's likeliest tokens,
        estimated by the sampled token over the others (`forward.reference_divergence`); None unless the loss is marked
        with `divergence`."""
        self.advantages = device_arrays["advantages"]
        """Advantage of each token's agent, or of its turn."""
        self.mask = torch.ones(len(columns), dtype=torch.bool, device=logprobs.device)
        """Always True: these columns hold trained tokens only, none of prompts and tools."""
        self.lags = device_arrays["lags"]
        """int32: optimizer steps between the weights that sampled the token and the trained weights; -1: unknown."""
        for name in IDS:
            setattr(self, name, device_arrays[name])
        self.weights = device_arrays.get("weights")
        """Factor on each token's loss, from the normalizer, if the trainer evaluates the loss per micro-batch."""
        self.seats: Sequence[str] = columns.names["seat"]
        """Names of the seats, indexed by the ids in `seat`."""

    @staticmethod
    def of(
        columns: TokenColumns, head: HeadOutput, reference: HeadOutput | None, weights: NDArray[np.float32]
    ) -> LossBatch:
        """Make the batch of a model's outputs, whose columns are leaves, detached from the model's graph."""
        return LossBatch(
            columns,
            logprobs=head.logprob.detach().requires_grad_(),
            entropies=head.entropy.detach().requires_grad_(),
            reference_logprobs=None if reference is None else reference.logprob,
            reference_kl=None if head.reference_kl is None else head.reference_kl.detach().requires_grad_(),
            weights=weights,
        )

    row: Tensor
    """Id of the token sequence, int64 from 0. An agent has one sequence, and one more for each rewrite of its
    context.
    """
    turn: Tensor
    """Id of the turn that sampled the token: one engine call of one agent. An agent's ids ascend in time."""
    agent: Tensor
    """Id of the conversation: one agent in one episode."""
    episode: Tensor
    """Id of the episode."""
    seat: Tensor
    """Id of the seat; see `seats`."""
    group: Tensor
    """Id of the group: the episodes that are compared with each other."""

    def __len__(self) -> int:
        return len(self.logprobs)

    @property
    def log_ratio(self) -> Tensor:
        """log w = log pi - log mu, clamped to ±`LOG_RATIO_LIMIT`, [n]."""
        return (self.logprobs - self.behavior_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

    @property
    def ratio(self) -> Tensor:
        """Importance ratio w = pi / mu, [n]."""
        return self.log_ratio.exp()

    @cached_property
    def proximal_logprobs(self) -> Tensor:
        """Log-probabilities of a policy between the sampling and the trained one, without gradient, [n].

        log mu + (1 - 1/lag) (log pi - log mu), and log pi at lag 0: the version one step before the current one, by
        interpolation instead of a forward pass (A-3PO, arXiv:2512.06547; AReaL's `loglinear`). An unknown lag is 1.
        """
        lags = self.lags.to(self.logprobs.dtype)
        share = torch.where(self.lags == 0, torch.ones_like(lags), 1 - 1 / lags.clamp(min=1))
        now = self.logprobs.detach()
        return self.behavior_logprobs + share * (now - self.behavior_logprobs)

    def sum(self, values: Tensor, by: Id) -> Tensor:
        """Return for each token the sum of `values` over the tokens with the same id, shape [n]."""
        number = getattr(self, by)
        size = int(number.max()) + 1 if len(number) else 0
        return values.new_zeros(size).index_add(0, number, values)[number]

    def mean(self, values: Tensor, by: Id) -> Tensor:
        """Return for each token the mean of `values` over the tokens with the same id, shape [n]."""
        return self.sum(values, by) / self.sum(torch.ones_like(values), by)


class TokenGradients(NamedTuple):
    """A loss and its derivatives, per token, [n] each, without gradient."""

    loss: Tensor
    by_logprob: Tensor
    by_entropy: Tensor
    by_reference_kl: Tensor
    weight: Tensor
    """Absolute derivative of the policy loss by the token's log-probability, without entropy and KL."""

    @property
    def derivatives(self) -> tuple[Tensor, Tensor, Tensor]:
        """The derivatives by logprob, entropy and divergence from the reference."""
        return self.by_logprob, self.by_entropy, self.by_reference_kl
