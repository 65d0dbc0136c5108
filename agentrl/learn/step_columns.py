"""Columns of a step: the trainer's values for each of its tokens, and the metrics of the mismatch with the engine's.

They are written to `steps/<policy>/<lineage>.<step>.safetensors`:
  `offsets`           int64 [rows + 1], where each row's trained tokens begin in the columns below
  `position`          int64 [tokens], position of the token in its row
  `trainer_logprobs`  float32 [tokens], NaN where the token was not forwarded (no gradient could come from its row)
  `entropy`           float32 [tokens], of the distribution the trainer computed, in nats; NaN in the same places
  `behavior_logprobs` float32 [tokens], recorded by the engine
  `advantages`        float32 [tokens]; with `credit.advantage = "gae"` those that the trainer computed
  `lag`               int32 [tokens], steps from the weights that sampled the token to those the trainer computed with;
                      at least 1 for those of an earlier lineage, -1 where it is not known who sampled
  metadata `rows`     JSON, [[episode id, row index of the unit], …] in the order the trainer consumed them
The mismatch metrics compare the trainer's log-probabilities with the recorded ones. For rows sampled by the very
weights that the trainer computes with, both describe the same distribution: their difference is that of the two
implementations (dtype, kernels, routing, filters, a wrong adapter). For other rows, the optimizer steps in between add
to it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load, save

from agentrl.core.records import PolicyVersion, TrainingSample
from agentrl.credit.samples import input_digest, row_digest, token_lags, trained_positions
from agentrl.learn.loss_batch import LOG_RATIO_LIMIT
from agentrl.learn.storage import converting_write_errors

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from agentrl.core.records import BoolArray

LAGS = ("0", "1", "2", "3", "4+")
"""Version lags that the metrics distinguish."""


class StepColumns:
    """The rows of a step in the order of their consumption."""

    def __init__(self) -> None:
        """Begin without rows."""
        self._rows: list[tuple[str, int]] = []
        self._seats: list[str] = []
        self._digests: list[bytes] = []
        self._positions: list[NDArray[np.int64]] = []
        self._advantages: list[NDArray[np.float32]] = []
        self._logprobs: list[NDArray[np.float32]] = []
        self._entropies: list[NDArray[np.float32]] = []
        self._behavior: list[NDArray[np.float32]] = []
        self._lags: list[NDArray[np.int32]] = []
        self._fresh: list[bool] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, samples: Sequence[TrainingSample], version: PolicyVersion) -> int:
        """Append rows to be trained by the weights of `version`; returns the index of the first."""
        first = len(self._rows)
        for sample, positions in zip(samples, trained_positions(samples), strict=True):
            self._rows.append((sample.episode_id, sample.row_index))
            self._seats.append(sample.seat)
            self._digests.append(row_digest(sample))
            self._positions.append(positions)
            self._advantages.append(sample.advantages[positions].astype(np.float32))
            self._logprobs.append(np.full(len(positions), np.nan, np.float32))
            self._entropies.append(np.full(len(positions), np.nan, np.float32))
            self._behavior.append(sample.behavior_logprobs[positions].astype(np.float32))
            lags = token_lags(sample, version)
            self._lags.append(lags[positions])
            self._fresh.append(bool(sample.spans) and not (lags > 0).any())
        return first

    def record_advantages(self, first: int, starts: NDArray[np.int64], advantages: NDArray[np.float32]) -> None:
        """Replace the advantages of rows, from row `first` on; row i has the tokens from `starts[i]` on."""
        for row, (start, stop) in enumerate(pairwise(starts.tolist()), first):
            self._advantages[row] = advantages[start:stop]

    def record(
        self,
        first: int,
        starts: NDArray[np.int64],
        rows: Sequence[int],
        logprobs: NDArray[np.float32],
        entropies: NDArray[np.float32],
    ) -> None:
        """Fill in what was computed for some rows, counted from row `first`; row i has the tokens from `starts[i]`
        on."""
        for row in rows:
            tokens = slice(starts[row], starts[row + 1])
            self._logprobs[first + row], self._entropies[first + row] = logprobs[tokens], entropies[tokens]

    def encode(self) -> bytes:
        """Serialize these rows for `merge`."""
        offsets = np.cumsum([0, *map(len, self._positions)], dtype=np.int64)
        columns: dict[str, NDArray[Any]] = {
            "offsets": offsets,
            "position": np.concatenate([np.empty(0, np.int64), *self._positions]),
            "advantages": np.concatenate([np.empty(0, np.float32), *self._advantages]),
            "trainer_logprobs": np.concatenate([np.empty(0, np.float32), *self._logprobs]),
            "entropy": np.concatenate([np.empty(0, np.float32), *self._entropies]),
            "behavior_logprobs": np.concatenate([np.empty(0, np.float32), *self._behavior]),
            "lag": np.concatenate([np.empty(0, np.int32), *self._lags]),
            "fresh": np.array(self._fresh, np.uint8),
            "digests": np.frombuffer(b"".join(self._digests), np.uint8),
            "rows": np.frombuffer(json.dumps(self._rows).encode(), np.uint8),
            "seats": np.frombuffer(json.dumps(self._seats).encode(), np.uint8),
        }
        return save(columns)


class MergedRankColumns:
    """The step's columns of all ranks together, rows in rank order, for the step's file and its metrics."""

    def __init__(self, parts: Sequence[bytes]) -> None:
        """Merge the results of `StepColumns.encode`, one per rank."""
        tables = [load(part) for part in parts]
        self.rows: list[list[Any]] = [row for part in tables for row in json.loads(part["rows"].tobytes())]
        seats = [seat for part in tables for seat in json.loads(part["seats"].tobytes())]
        lengths = np.concatenate([np.diff(part["offsets"]) for part in tables])
        names = ("position", "trainer_logprobs", "entropy", "behavior_logprobs", "advantages", "lag")
        self.columns = {name: np.concatenate([part[name] for part in tables]) for name in names}
        self.columns["offsets"] = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        self.fresh = np.repeat(np.concatenate([part["fresh"] for part in tables]).astype(np.bool_), lengths)
        """Bool [tokens]: whether the token's whole row was sampled by the weights the trainer computed with."""
        self.seats = np.repeat(np.array(seats, dtype=object), lengths)
        """Str [tokens]: seat of the agent that sampled the token."""
        self.input_digest = input_digest(part["digests"].tobytes() for part in tables)

    def mismatch(self) -> dict[str, float]:
        """Return the mismatch metrics of the step; see `mismatch_metrics` and `seat_mismatch_metrics`."""
        trainer, behavior = self.columns["trainer_logprobs"], self.columns["behavior_logprobs"]
        by_lag = mismatch_metrics(trainer, behavior, lag=self.columns["lag"], fresh=self.fresh)
        return by_lag | seat_mismatch_metrics(trainer, behavior, self.seats)

    def write(self, path: Path) -> None:
        """Write the step's file atomically, without syncing it.

        Raises:
            StorageError: writing failed.
        """
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        with converting_write_errors(path):
            # Create only these two directories: a moved run must not be recreated at its old path.
            for folder in (path.parent.parent, path.parent):
                folder.mkdir(exist_ok=True)
            try:
                partial.write_bytes(save(self.columns, metadata={"rows": json.dumps(self.rows)}))
                partial.rename(path)
            finally:
                partial.unlink(missing_ok=True)


def read_step_columns(path: Path) -> tuple[list[list[Any]], dict[str, NDArray[Any]]]:
    """Read the rows and columns of a step's file."""
    with safe_open(path, framework="np") as file:
        return json.loads(file.metadata()["rows"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


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
