"""What vLLM's model runner V2 returns for the trainer: the experts of each position, the kept set of each token.

Owns the order in which the expert rows of a call's requests are joined, and what is known of a session's earlier rows,
so that each turn returns only new positions. The V1 runner, which CPUs get, returns neither.
Invariant: tokens keep the experts they were sampled through. Where weights change within a call, the rows of its
context are repeated for the newer weights.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from agentrl.core.errors import EngineCapabilityError, EngineError
from agentrl.core.tokens import ExpertRouting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel
    from vllm.config import VllmConfig
    from vllm.outputs import CompletionOutput

    from agentrl.core.records import ExpertArray, Int32Array


@dataclass(frozen=True, slots=True)
class RoutedContext:
    """The positions whose experts were returned, and what computed them."""

    computed_by: object
    """Version that computed all of them; None: several versions did."""
    token_ids: Int32Array


@dataclass(slots=True)
class CallRouting:
    """Experts of a call's positions, joined from the requests that made the call."""

    layers: Sequence[int]
    """Numbers of the layers with experts; vLLM has rows for the others too."""
    context: Int32Array
    """Context of the call."""
    before: RoutedContext | None = None
    """Positions that earlier calls of the row returned."""
    _parts: list[tuple[object, int, ExpertArray]] = field(default_factory=list)
    """Version, first position and experts of each request that returned any."""

    def start_of_request(self, version: object) -> int:
        """Return the first position whose experts a request is to return; earlier ones are known."""
        if self._parts:
            computed_by, start, rows = self._parts[-1]
            return start + len(rows) if computed_by is version else 0
        if self.before is None or self.before.computed_by is not version:
            return 0
        limit = min(len(self.before.token_ids), len(self.context) - 1)
        differs = np.flatnonzero(self.before.token_ids[:limit] != self.context[:limit])
        return int(differs[0]) if len(differs) else limit

    def append(self, output: CompletionOutput, start: int, stop: int, version: object) -> None:
        """Add the experts of positions `[start, stop)` that a request has returned.

        Args:
            output: last output of the request.
            start: the request's first position.
            stop: the position of the last token that was kept; tokens after it were withdrawn.
            version: version that computed the request; None: several versions did.

        Raises:
            EngineError: vLLM returned fewer rows than positions.
        """
        rows = output.routed_experts
        if rows is None or stop <= start:
            return
        if len(rows) < stop - start:
            raise EngineError(f"vLLM returned the experts of {len(rows)} of {stop - start} positions")
        self._parts.append((version, start, rows[: stop - start, self.layers]))  # uint8 or uint16, by their number

    def experts(self) -> ExpertRouting | None:
        """Return the routing of the call; None if no request returned any."""
        return ExpertRouting.of_stretches((start, rows) for _, start, rows in self._parts)

    def after(self, token_ids: Int32Array) -> RoutedContext | None:
        """Return the known rows after the call, given its context and tokens."""
        if not self._parts:
            return self.before
        computed_by, start, rows = self._parts[-1]
        return RoutedContext(computed_by, token_ids[: start + len(rows)])


def top_k_without_filter(config: VllmConfig) -> int:
    """Return the `top_k` of a request without filters; a vLLM that returns kept sets accepts none but positive ones."""
    return config.model_config.get_vocab_size() if config.model_config.return_sampling_mask else 0


def expert_layers(model: PreTrainedModel) -> list[int]:
    """Return the numbers of the layers that have experts.

    Raises:
        EngineCapabilityError: there is none, or a layer has too many experts.
    """
    names = (re.fullmatch(r".*?\.(\d+)\..*experts", name) for name, _ in model.named_modules())
    layers = sorted({int(match[1]) for match in names if match})
    if not layers:
        raise EngineCapabilityError(
            f"engine.capture_routing: {type(model).__name__} has no experts. Use a mixture-of-experts model such as "
            "Qwen3-MoE or Mixtral, or set capture_routing = false"
        )
    return layers
