"""The positions that embedded engines compute, against those that differ in their tokens or weights."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from agentrl.engines.embedded import forward
from agentrl.engines.embedded.batcher import Batcher
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.engines.embedded.slots import SlotKvCache

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from agentrl.core.tokens import Completion


@dataclass
class ComputedTokens:
    """Counts of what engines computed. The distinct positions follow from requests and completions alone."""

    computed: int = 0
    """Positions whose keys the model's first layer made, padding included."""
    passes: dict[tuple[int, int], int] = field(default_factory=dict)
    """Number of passes, by their rows and tokens per row."""
    seen: set[int] = field(default_factory=set)
    """Hashes of weights with the tokens up to a position."""

    @property
    def over_distinct(self) -> float:
        """Computed positions over distinct ones."""
        return self.computed / len(self.seen)

    def add_call(self, context: list[int], completion: Completion) -> None:
        """Add the positions of a call: those of its context, and of the tokens it sampled but for the last."""
        tokens = context + completion.token_ids.tolist()
        for span in completion.spans:
            prefix = hash(span.version)
            for token in tokens[: len(context) + span.stop - 1]:
                prefix = hash((prefix, token))
                self.seen.add(prefix)

    def add_pass(self, key: Tensor) -> None:
        """Add a pass by its keys, `[B, heads, t, dim]`."""
        rows, width = key.shape[0], key.shape[2]
        self.computed += rows * width
        self.passes[rows, width] = self.passes.get((rows, width), 0) + 1


@contextmanager
def counted() -> Iterator[ComputedTokens]:
    """Count what the engines of this process compute for calls within the context."""
    counts = ComputedTokens()
    generate, update = EmbeddedEngine.generate, SlotKvCache.update

    async def counted_generate(self: EmbeddedEngine, session: Any, request: Any, on_delta: Any = None) -> Completion:
        completion = await generate(self, session, request, on_delta)
        counts.add_call(request.token_ids.tolist(), completion)
        return completion

    def counted_update(self: SlotKvCache, key: Tensor, value: Tensor, layer_index: int, *rest: Any) -> Any:
        # The check of a model at its start uses a cache of two slots.
        if layer_index == 0 and self.slots > 2:
            counts.add_pass(key)
        return update(self, key, value, layer_index, *rest)

    with ExitStack() as stack:
        stack.enter_context(patch.object(EmbeddedEngine, "generate", counted_generate))
        stack.enter_context(patch.object(SlotKvCache, "update", counted_update))
        yield counts


@contextmanager
def unshared() -> Iterator[None]:
    """Let every conversation compute all its positions, as long as its own cache does not hold them."""
    with (
        patch.object(Batcher, "_longest_prefix", lambda self, call, ends: (call.session.slot, 0)),
        patch.object(forward, "_twins", lambda one, columns: None),
    ):
        yield
