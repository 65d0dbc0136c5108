"""The trainer's side of a version's probe: a few contexts, and what the weights that are published say to them.

Owns: which tokens, and the forward pass. What an engine makes of it is `engines.weights`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from agentrl.core.errors import TrainerError
from agentrl.core.ids import key64
from agentrl.core.training_records import TrainingSample
from agentrl.engines.weights import Probe
from agentrl.learn.forward import token_logprobs
from agentrl.learn.packing import pack

if TYPE_CHECKING:
    from agentrl.core.records import Float32Array, Int32Array
    from agentrl.learn.models import PolicyModel


_CONTEXTS = 1
"""Enough to tell versions apart; each more costs every publishing a forward pass."""
_TOKENS = 128
"""Next tokens asked for after each context."""
_LENGTH = 16
"""Of a context."""
_PASS = 2048
"""Tokens forwarded at once."""


class ProbeMaker:
    """Makes the probes of a run's versions, all of the same tokens.

    Args:
        model: with the weights that the run began with.
        max_context: longest one an engine takes, with one more token.
    """

    def __init__(self, model: PolicyModel, *, max_context: int) -> None:
        vocabulary = int(model.model.config.get_text_config().vocab_size)
        length = max(1, min(_LENGTH, max_context - 1))

        def drawn(kind: str, count: int) -> Int32Array:
            return np.array([key64("probe", kind, at) % vocabulary for at in range(count)], np.int32)

        # Likely tokens hardly move with the weights; those drawn from the whole vocabulary do.
        self._contexts = drawn("contexts", _CONTEXTS * length).reshape(_CONTEXTS, length)
        self._token_ids = drawn("tokens", _TOKENS)
        self._start_logprobs = self._logprobs(model)

    def of(self, model: PolicyModel) -> Probe:
        """The probe of a policy's present weights.

        Raises:
            TrainerError: they give log-probabilities that are not finite.
        """
        logprobs = self._logprobs(model) if model.parameters else self._start_logprobs
        if not np.isfinite(logprobs).all():
            raise TrainerError(
                "the weights that are to be published give log-probabilities that are not finite: training has "
                "diverged; resume from an older checkpoint with a smaller learning rate"
            )
        return Probe(
            contexts=self._contexts,
            token_ids=self._token_ids,
            logprobs=logprobs,
            start_logprobs=self._start_logprobs,
        )

    def _logprobs(self, model: PolicyModel) -> Float32Array:
        """Of each token after each context, `[m, n]`."""
        rows = [np.append(context, token).astype(np.int32) for context in self._contexts for token in self._token_ids]
        nothing = np.zeros(len(rows[0]), np.float32)
        last = np.arange(len(rows[0])) == len(rows[0]) - 1
        samples = [
            TrainingSample(token_ids=row, loss_mask=last, behavior_logprobs=nothing, advantages=nothing) for row in rows
        ]
        model.activate()
        found = np.zeros(len(samples), np.float32)
        with torch.no_grad():
            for batch in pack(samples, max_tokens=_PASS, share=model.shared_prefixes):
                head = token_logprobs(model.model, batch, shared=model.shared_prefixes)
                found[batch.sample] = head.logprob.cpu().numpy()
        return found.reshape(len(self._contexts), len(self._token_ids))
