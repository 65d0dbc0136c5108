"""The trained tokens of a step: the input of its loss, its file, and its mismatch metrics.

A step has its tokens as a table, and beside it what a step alone has: ids, lags, and the model's outputs. Ids are dense
integers from 0, so that a mean over a conversation is one `index_add`. Columns are written to
`steps/<policy>/<lineage>.<step>.safetensors`:
  `offsets`           int64 [rows + 1], where each row's trained tokens begin in the columns below
  `position`          int64 [tokens], position of the token in its row
  `trainer_logprobs`  float32 [tokens], NaN where the token was not forwarded (no gradient could come from its row)
  `entropy`           float32 [tokens], of the distribution the trainer computed, in nats; NaN in the same places
  `behavior_logprobs` float32 [tokens], recorded by the engine
  `advantages`        float32 [tokens]
  `lag`               int32 [tokens], steps from the weights that sampled the token to those the trainer computed with;
                      at least 1 for those of an earlier lineage, -1 where it is not known who sampled
  metadata `rows`     JSON, [[episode id, row index of the unit], …] in the order the trainer consumed them
The mismatch metrics compare the trainer's log-probabilities with the recorded ones. For rows sampled by the very
weights that the trainer computes with, both describe the same distribution: their difference is that of the two
implementations (dtype, kernels, routing, filters, a wrong adapter). For other rows, the optimizer steps in between add
to it.

Owns: the columns, their exchange between ranks, the file, the metrics. Needs numpy and no torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from agentrl.core import ids
from agentrl.core.column_files import decode_columns, encode_columns
from agentrl.core.records import NEVER_RESUMED, Lines, PolicyVersion
from agentrl.core.tokens import LOSS_COLUMNS, EncodedTokens, Tokens, TrainingSample
from agentrl.credit.samples import input_digest, row_digest, token_lags, trained_positions

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from agentrl.core.records import BoolArray, Float32Array

LAGS = ("0", "1", "2", "3", "4+")
"""Version lags that the metrics distinguish."""
LOG_RATIO_LIMIT = 20.0
"""Bound on |log w|, so that no recorded value can overflow the ratio."""

Id = Literal["row", "turn", "agent", "episode", "seat", "group"]
IDS: tuple[Id, ...] = ("row", "turn", "agent", "episode", "seat", "group")
_GLOBAL_IDS: tuple[Id, ...] = ("seat", "group")
"""Ids that rows of several ranks may have in common; an episode is always on one rank."""
_COLUMNS = ("lags", *IDS, "position", "fresh")
"""Columns that a step adds to the table of tokens."""
_EMPTY: dict[str, Any] = {column.name: np.empty(0, column.dtype) for column in LOSS_COLUMNS}
_NO_TOKENS = Tokens(token_ids=np.empty(0, np.int32), **_EMPTY)
"""Joined with others, it gives them all columns of losses."""
_TOKENS = "tokens."
"""Begins the names of the table's columns where they are encoded beside the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenColumns:
    """The trained tokens of some samples, n in all, sample after sample."""

    tokens: Tokens  # [n], at least with `LOSS_COLUMNS`; without versions, kept sets and experts
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
    position: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))  # [n], in the token's row
    fresh: BoolArray = field(default_factory=lambda: np.empty(0, np.bool_))
    """[n], whether the token's whole row was sampled by the weights the trainer computes with."""
    computed: dict[str, NDArray[np.float32]] = field(default_factory=dict)
    """Outputs of the model, [n] each: at least `trainer_logprobs` and `entropy`, NaN until they are computed."""
    rows: list[tuple[str, int]] = field(default_factory=list)
    """Episode and row index of each sample."""
    digests: bytes = b""
    """`row_digest` of each sample, one after another."""

    @staticmethod
    def of(
        samples: Sequence[TrainingSample], version: PolicyVersion, lines: Lines = NEVER_RESUMED, *, group_size: int
    ) -> TokenColumns:
        """Make the columns of samples, to be trained by the weights of `version` in a run with these `lines`."""
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

        lags = [token_lags(sample, version, lines) for sample in samples]
        is_fresh = [bool(sample.spans) and not (lag > 0).any() for sample, lag in zip(samples, lags, strict=True)]
        parts = [sample.with_column("kept", None).take(at) for sample, at in zip(samples, positions, strict=True)]
        trained_lags = [lag[at] for lag, at in zip(lags, positions, strict=True)]
        return TokenColumns(
            tokens=Tokens.join([_NO_TOKENS, *parts]),
            lags=np.concatenate([np.empty(0, np.int32), *trained_lags]),
            names={name: [str(key[0]) for key in numbers[name]] for name in _GLOBAL_IDS},
            starts=np.cumsum([0, *counts], dtype=np.int64),
            position=np.concatenate([np.empty(0, np.int64), *positions]),
            fresh=np.repeat(np.array(is_fresh, np.bool_), counts),
            computed={name: np.full(sum(counts), np.nan, np.float32) for name in ("trainer_logprobs", "entropy")},
            rows=[(sample.episode_id, sample.row_index) for sample in samples],
            digests=b"".join(map(row_digest, samples)),
            **id_columns,
        )

    def __len__(self) -> int:
        return len(self.row)

    def tokens_of(self, members: Sequence[int]) -> NDArray[np.int64]:
        """Return the indices of the tokens of some samples, in the order of the samples."""
        parts = [np.arange(self.starts[member], self.starts[member + 1]) for member in members]
        return np.concatenate([np.empty(0, np.int64), *parts])

    def take(self, tokens: NDArray[np.int64]) -> TokenColumns:
        """Return the columns of some tokens for a loss, with unchanged ids."""
        columns: dict[str, Any] = {name: getattr(self, name)[tokens] for name in ("lags", *IDS)}
        return TokenColumns(
            tokens=self.tokens.take(tokens), **columns, names=self.names, starts=np.array([0, len(tokens)])
        )

    def loss_inputs(self) -> dict[str, NDArray[Any]]:
        """Return the columns that a loss sees besides the model's outputs, [n] each, by their name in a `LossBatch`."""
        recorded = {column.in_loss: getattr(self.tokens, column.name) for column in LOSS_COLUMNS}
        return recorded | {name: getattr(self, name) for name in ("lags", *IDS)}

    @property
    def advantages(self) -> Float32Array:
        """The column of the table, which is always there."""
        assert self.tokens.advantages is not None
        return self.tokens.advantages

    def record(self, tokens: NDArray[np.int64], logprobs: NDArray[np.float32], entropies: NDArray[np.float32]) -> None:
        """Fill in what the model computed for some tokens, [n] each; the other tokens' values are ignored."""
        self.computed["trainer_logprobs"][tokens] = logprobs[tokens]
        self.computed["entropy"][tokens] = entropies[tokens]

    def encode(self) -> bytes:
        """Serialize the columns for the other ranks."""
        columns = {name: getattr(self, name) for name in (*_COLUMNS, "starts")} | self.computed
        columns["digests"] = np.frombuffer(self.digests, np.uint8)
        table = self.tokens.encode()
        encoded = {"ids": table.token_ids} | table.columns
        columns |= {_TOKENS + name: np.frombuffer(data, np.uint8) for name, data in encoded.items()}
        return encode_columns(columns, {"names": json.dumps(self.names), "rows": json.dumps(self.rows)})

    @staticmethod
    def decode(data: bytes) -> TokenColumns:
        """Decode what `encode` serialized."""
        metadata, plain_columns = decode_columns(data)
        columns: dict[str, NDArray[Any]] = {name: np.asarray(column) for name, column in plain_columns.items()}
        columns["fresh"] = columns["fresh"].astype(np.bool_)
        own = {name: columns.pop(name) for name in (*_COLUMNS, "starts")}
        names = [name for name in columns if name.startswith(_TOKENS)]
        table: dict[str, Any] = {name.removeprefix(_TOKENS): columns.pop(name).data for name in names}
        return TokenColumns(
            **own,
            tokens=EncodedTokens(table.pop("ids"), (), table).decode(),
            digests=columns.pop("digests").tobytes(),
            computed=columns,
            names=json.loads(metadata["names"]),
            rows=[(episode, row) for episode, row in json.loads(metadata["rows"])],
        )

    @staticmethod
    def merge(parts: Sequence[TokenColumns]) -> TokenColumns:
        """Merge the columns of several ranks or calls, in order."""
        columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMNS}
        all_names: dict[str, list[str]] = {}
        for kind in IDS:
            if kind in _GLOBAL_IDS:
                all_names[kind] = list(dict.fromkeys(name for part in parts for name in part.names[kind]))
                number = {name: index for index, name in enumerate(all_names[kind])}
                new_ids = [np.array([number[name] for name in part.names[kind]], np.int64) for part in parts]
                renumbered = [new[getattr(part, kind)] for new, part in zip(new_ids, parts, strict=True)]
            else:
                sizes = [int(getattr(part, kind).max()) + 1 if len(part) else 0 for part in parts]
                before = np.cumsum([0, *sizes[:-1]])
                renumbered = [getattr(part, kind) + at for part, at in zip(parts, before, strict=True)]
            columns[kind] = np.concatenate(renumbered)
        lengths = np.concatenate([np.diff(part.starts) for part in parts])
        return TokenColumns(
            **columns,
            tokens=Tokens.join([part.tokens for part in parts]),
            names=all_names,
            starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            computed={name: np.concatenate([part.computed[name] for part in parts]) for name in parts[0].computed},
            rows=[row for part in parts for row in part.rows],
            digests=b"".join(part.digests for part in parts),
        )

    @property
    def input_digest(self) -> str:
        """Digest of the step's input; see `credit.samples.input_digest`."""
        return input_digest([self.digests])

    def mismatch(self) -> dict[str, float]:
        """Return the mismatch metrics of the step; see `mismatch_metrics` and `seat_mismatch_metrics`."""
        trainer, behavior = self.computed["trainer_logprobs"], self.tokens.logprobs
        by_lag = mismatch_metrics(trainer, behavior, lag=self.lags, fresh=self.fresh)
        return by_lag | seat_mismatch_metrics(trainer, behavior, np.array(self.names["seat"], object)[self.seat])

    def encode_file(self) -> bytes:
        """Return the content of the step's file."""
        columns: dict[str, NDArray[Any]] = {
            "offsets": self.starts,
            "position": self.position,
            "trainer_logprobs": self.computed["trainer_logprobs"],
            "entropy": self.computed["entropy"],
            "behavior_logprobs": self.tokens.logprobs,
            "advantages": self.advantages,
            "lag": self.lags,
        }
        return encode_columns(columns, {"rows": json.dumps(self.rows)})


def mismatch_metrics(
    trainer: NDArray[np.float32], behavior: NDArray[np.float32], *, lag: NDArray[np.int32], fresh: BoolArray
) -> dict[str, float]:
    """Compute mismatch metrics over the tokens whose rows were forwarded.

    With log w = trainer - behavior, `k3` is the mean of w - 1 - log w: never negative, an unbiased estimate of KL(mu ||
    pi) over tokens sampled from mu (Schulman 2020, http://joschu.net/blog/kl-approx.html). `difference` is the mean of
    |log w|, `max_difference` the largest.

    Args:
        trainer: [n], NaN where the token was not forwarded.
        behavior: [n], recorded by the engine.
        lag: [n], steps between the weights of both; -1: unknown.
        fresh: [n], whether the token's whole row was sampled by the weights the trainer computed with: a token of lag 0
            in another row may have been sampled over KV of older weights.

    Returns:
        `mismatch/k3`, `/difference`, `/max_difference`, `/tokens` over fresh tokens, and the same as `lag_k3/<lag>`,
        `lag_difference/<lag>`, `lag_max_difference/<lag>`, `lag_tokens/<lag>` by lag; lags without tokens are left out.
    """
    groups = {"mismatch/{}": fresh}
    for at, word in enumerate(LAGS):
        groups[f"lag_{{}}/{word}"] = lag == at if at < len(LAGS) - 1 else lag >= at
    metrics: dict[str, float] = {}
    for name, tokens in groups.items():
        values = _log_ratio(trainer, behavior, tokens)
        if len(values):
            metrics[name.format("k3")] = float((np.expm1(values) - values).mean())
            metrics[name.format("difference")] = float(np.abs(values).mean())
            metrics[name.format("max_difference")] = float(np.abs(values).max())
            metrics[name.format("tokens")] = float(len(values))
    return metrics


def seat_mismatch_metrics(
    trainer: NDArray[np.float32], behavior: NDArray[np.float32], seats: NDArray[np.object_]
) -> dict[str, float]:
    """Return `seat_k3/<seat>` if the tokens, all of shape [n], belong to several seats; k3 as in `mismatch_metrics`."""
    names = sorted(set(seats.tolist()))
    if len(names) < 2:
        return {}
    log_ratios = {name: _log_ratio(trainer, behavior, seats == name) for name in names}
    return {f"seat_k3/{name}": float((np.expm1(w) - w).mean()) for name, w in log_ratios.items() if len(w)}


def _log_ratio(
    trainer: NDArray[np.float32], behavior: NDArray[np.float32], tokens: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Return log w of the forwarded ones among `tokens`."""
    token_mask = tokens & np.isfinite(trainer)
    difference: NDArray[np.float64] = trainer[token_mask].astype(np.float64) - behavior[token_mask]
    return difference.clip(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
