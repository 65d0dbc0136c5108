"""What a trainer consumes: units by reference, an optimizer step of them, the rows it reads; and what it reports.

As in `records.py`, records are frozen and token columns are numpy arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl.core.records import DataLocation, PolicyVersion, SamplingMask, VersionSpan

if TYPE_CHECKING:
    from agentrl.core.records import BoolArray, Float32Array, Int32Array, RoutingArray


@dataclass(frozen=True, slots=True)
class TrajectoryCredit:
    """The advantage of one trajectory, computed on the control path from headers alone."""

    seat: str
    index: int
    reward: float
    advantage: float
    """Of every token; of the first turn's where `turn_advantages` has one per turn, the last one of all later turns."""
    baseline: float
    turn_advantages: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """An episode's trajectories of one policy: always in one optimizer step. Token data stays where `location` says."""

    episode_id: str
    attempt: int
    policy: str
    location: DataLocation
    credits: tuple[TrajectoryCredit, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """One optimizer step of one policy, by reference."""

    step_id: int
    """The step these units make: current step + 1. Trainers are idempotent by it."""
    policy: str
    units: tuple[Unit, ...]
    normaliser: float
    """The constant the summed token losses are divided by: step_size × configured tokens per unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
    """A row to train on."""

    token_ids: Int32Array  # [T]
    loss_mask: BoolArray  # [T]
    behavior_logprobs: Float32Array  # [T]
    advantages: Float32Array  # [T], 0 where the mask is False
    temperature: float = 1.0
    spans: tuple[VersionSpan, ...] = ()
    """Over positions: which weights sampled the token."""
    expert_routing: RoutingArray | None = None  # [R, layers, top_k], R >= the last trained position; -1: not recorded
    sampling_mask: SamplingMask | None = None  # counts [T]
    episode_id: str = ""
    row_index: int = 0
    seat: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What an optimizer step did."""

    step_id: int
    policy: str
    started_from: PolicyVersion
    loss: float
    grad_norm: float
    samples: int
    tokens: int
    """Trained tokens."""
    seconds: float
    """Wall seconds the trainer was busy with it."""
    metrics: Mapping[str, float]
    input_digest: str
    """blake2b over the step's rows, masks, behavior logprobs and advantages, in order."""
    columns: str | None = None
    """File with the step's trainer logprobs, relative to the run directory."""
