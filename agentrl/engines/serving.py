"""Which versions an engine serves, and with which weights: one model per full version, one place per adapter.

Owns: the live versions, who holds them (pins, leases, calls in flight), and when their weights may be overwritten.
Does not know slots or calls' tokens. All changes happen between two forward passes.
Invariants: a version that is current, kept, pinned, leased or used by a call is never overwritten; a policy has exactly
one current version; base weights serve as long as anything is built on them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM

from agentrl.engines.adapter_bank import AdapterBank
from agentrl.engines.sessions import LiveVersion, live_version, newest_of
from agentrl.engines.weight_files import ready_to_sample

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor
    from transformers import PreTrainedModel

    from agentrl.core.records import PolicyVersion

BASE = -1
"""The place of rows that use no adapter."""


@dataclass(slots=True, eq=False)
class ServedModel:
    """One copy of the model's weights."""

    model: PreTrainedModel
    state: Mapping[str, Tensor]
    """Its parameters and persistent buffers under the names of the checkpoint."""
    bank: AdapterBank | None = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> ServedModel:
        """Wrap a loaded model."""
        return cls(model, dict(model.state_dict()))

    def overwrite(self, weights: Mapping[str, Tensor]) -> None:
        """Copy checked weights into place."""
        with torch.inference_mode():
            for name, tensor in weights.items():
                if name in self.state:
                    self.state[name].copy_(tensor)

    def copied(self) -> dict[str, Tensor]:
        """What `overwrite` needs to bring the present weights back."""
        return {name: tensor.clone() for name, tensor in self.state.items()}


@dataclass(slots=True, eq=False, kw_only=True)
class Serving(LiveVersion):
    """A version the embedded engine can sample from."""

    served: ServedModel
    adapter: int = BASE


@dataclass(slots=True)
class VersionTable:
    """The live versions of all policies on one base model."""

    base: ServedModel
    places: int
    max_rank: int
    current: dict[str, Serving] = field(default_factory=dict)
    live: dict[PolicyVersion, Serving] = field(default_factory=dict)
    _spare: ServedModel | None = None

    def start(self, versions: Iterable[PolicyVersion]) -> None:
        """Serve the base weights as these versions."""
        for version in versions:
            self.live[version] = self.current[version.policy] = Serving(version=version, served=self.base)

    def of_policy(self, policy: str) -> Serving:
        """The policy's current version.

        Raises:
            EngineError: the engine does not serve the policy.
        """
        return newest_of(self.current, policy)

    def of_version(self, version: PolicyVersion) -> Serving:
        """A live version.

        Raises:
            EngineError: the version is not (or no longer) here.
        """
        return live_version(self.live, version)

    def servings_of(self, served: ServedModel) -> list[Serving]:
        """Live versions that a model copy serves."""
        return [serving for serving in self.live.values() if serving.served is served]

    def target_for_full(self, policy: str) -> ServedModel | None:
        """The copy that a new full version of `policy` may overwrite; None: it needs a copy of its own.

        The base copy is never given away while adapters are built on it.
        """
        old = self.current.get(policy)
        if old is None or old.held or old.served.bank is not None:
            return None
        for other in self.servings_of(old.served):
            if other is not old and (other.held or other.calls or self.current.get(other.version.policy) is other):
                return None
        return old.served

    def give_back(self, copy: ServedModel) -> None:
        """A copy that came to serve nothing; the next one that is needed is this."""
        self._spare = copy

    def new_copy(self) -> ServedModel:
        """A copy of the architecture, to be filled."""
        if self._spare is not None:
            spare, self._spare = self._spare, None
            return spare
        template = self.base.model
        with torch.random.fork_rng(devices=[]):
            make: Any = AutoModelForCausalLM.from_config
            model = make(template.config, dtype=template.dtype, trust_remote_code=False)
        return ServedModel.of(ready_to_sample(model, template.device))

    def bank(self) -> AdapterBank:
        """The adapter bank of the base model, made when first needed."""
        if self.base.bank is None:
            self.base.bank = AdapterBank(self.base.model, places=self.places, max_rank=self.max_rank)
        return self.base.bank

    def promote(self, new: Serving) -> None:
        """Make a version current; its weights are where it says already."""
        old = self.current.get(new.version.policy)
        if new.adapter == BASE:
            for overwritten in self.servings_of(new.served):
                del self.live[overwritten.version]
        self.live[new.version] = self.current[new.version.policy] = new
        if old is not None:
            self.settle(old)

    def settle(self, serving: Serving) -> bool:
        """Forget a version that nothing needs any more; returns whether it was forgotten."""
        if serving.held or serving.calls or self.current.get(serving.version.policy) is serving:
            return False
        if self.live.get(serving.version) is not serving:
            return False
        if serving.adapter != BASE:
            del self.live[serving.version]
            self.bank().empty(serving.adapter)
            return True
        if serving.served is self.base:
            return False  # base weights cost nothing to keep while the copy stands
        del self.live[serving.version]
        if self._spare is None and not self.servings_of(serving.served):
            self.give_back(serving.served)
        return True
