"""Parts of a run for programs with a loop of their own: learners, a sampler, and a journal of requests.

A program opens a run directory with `open_parts`. It decides what is sampled and trained; the parts compute and record,
so `agentrl episode`, `agentrl step` and `agentrl run` show what it did. Distributions in packages/ import only public
names: these, those of `agentrl.formats`, and those of `agentrl`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from agentrl.config.policies import LoraConfig
from agentrl.core.errors import GroupTooSmallError, InputError, NonFiniteError, StorageError, TrainerError
from agentrl.core.ids import stable_hash64
from agentrl.core.ports import SamplingParams
from agentrl.core.records import PolicyVersion, WeightsRef
from agentrl.core.tokens import Completion
from agentrl.journal.requests import ClientRequest, RequestLog, RequestResult
from agentrl.parts.opening import Parts, TrainedSince, open_parts
from agentrl.parts.sampler import ClientSampler

if TYPE_CHECKING:
    from agentrl.parts.learner import AdamSettings, ClientLearner, Row, RowBatch

__all__ = [
    "AdamSettings",
    "ClientLearner",
    "ClientRequest",
    "ClientSampler",
    "Completion",
    "GroupTooSmallError",
    "InputError",
    "LoraConfig",
    "NonFiniteError",
    "Parts",
    "PolicyVersion",
    "RequestLog",
    "RequestResult",
    "Row",
    "RowBatch",
    "SamplingParams",
    "StorageError",
    "TrainedSince",
    "TrainerError",
    "WeightsRef",
    "open_parts",
    "stable_hash64",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'agentrl.parts' has no attribute {name!r}")
    from agentrl.parts import learner  # imports torch

    return getattr(learner, name)
