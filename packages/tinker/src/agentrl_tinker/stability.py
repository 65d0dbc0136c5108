"""What a server records of samples for the loss `stable_reinforce`, and how the rows of a pass find it again.

The recorded answer to a request with `record_stability_info` holds, for each sampled token, the likeliest tokens of the
distribution that it was drawn from. The provenance of a row names the sequences that its targets come from.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from agentrl.parts import InputError
from agentrl_tinker import messages

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from agentrl.parts import RequestLog
    from agentrl_tinker.messages import ClientRow, ProvenanceSpan, RecordedSample

TOP_TOKENS = 16
"""Number of the likeliest tokens that are recorded at each sampled token: 128 bytes."""
_FLOOR = -100.0
"""Log-probability that stands for a probability of 0."""


class RowDistributions(NamedTuple):
    """The distributions that the targets of a row were sampled from."""

    top_ids: NDArray[np.int64]
    """The likeliest tokens, `[n, TOP_TOKENS]`."""
    top_logprobs: NDArray[np.float32]
    """Their log-probabilities, and that of all others together, `[n, TOP_TOKENS + 1]`. Of a token that was not sampled
    nothing is known: the others have all the mass."""


def find_distributions(log: RequestLog, rows: Sequence[ClientRow]) -> list[RowDistributions]:
    """Find the recorded distributions of checked rows.

    Raises:
        InputError: a row names a sequence that is not there, was not recorded, or has other tokens or
            log-probabilities than the row.
    """

    # A group of samples is one answer, and its rows follow each other. Answers are large.
    @functools.lru_cache(maxsize=2)
    def recorded(request_id: str) -> dict[str, RecordedSample | None]:
        request = log.request(request_id)
        if request is None or request.route != "asample":
            return {}
        result = log.result(request_id)
        if result is None or result.kind != "protobuf":
            return {}
        samples = messages.read_stability_info(result.body)
        return {f"{request_id}:{number}": sample for number, sample in enumerate(samples)}

    distributions = []
    for row_number, row in enumerate(rows):
        target_distributions = RowDistributions(
            np.zeros((len(row.targets), TOP_TOKENS), np.int64),
            np.full((len(row.targets), TOP_TOKENS + 1), _FLOOR, np.float32),
        )
        target_distributions.top_logprobs[:, -1] = 0.0
        start = 0
        for span in row.provenance:
            targets = slice(start, start + span.length)
            start += span.length
            if span.is_sampled and span.length:
                sample = recorded(span.sequence_id.rpartition(":")[0]).get(span.sequence_id)
                if sample is None:
                    raise InputError(
                        f"datum {row_number}: there is no sequence {span.sequence_id[:100]!r} that was sampled with "
                        "record_stability_info, which the loss stable_reinforce needs"
                    )
                _check_targets(f"datum {row_number}", row, targets, span, sample)
                _copy_distributions(target_distributions, targets, span, sample)
        distributions.append(target_distributions)
    return distributions


def _check_targets(where: str, row: ClientRow, targets: slice, span: ProvenanceSpan, sample: RecordedSample) -> None:
    """Refuse targets that are not the tokens that they are said to be, and other log-probabilities than the recorded
    ones: the loss would not read them."""
    tokens = slice(span.offset, span.offset + span.length)
    if not np.array_equal(row.targets[targets], sample.token_ids[tokens]):
        raise InputError(
            f"{where}: target_tokens[{targets.start}:{targets.stop}] are not the tokens "
            f"[{tokens.start}:{tokens.stop}] of {span.sequence_id[:100]!r}"
        )
    logprobs = row.columns.get("logprobs")
    if logprobs is not None and not np.allclose(logprobs[targets], sample.logprobs[tokens], rtol=0, atol=1e-5):
        raise InputError(
            f"{where}: logprobs[{targets.start}:{targets.stop}] are not those that were sampled; the loss "
            "stable_reinforce reads the recorded distributions instead, so leave them as they were"
        )


def _copy_distributions(
    target_distributions: RowDistributions, targets: slice, span: ProvenanceSpan, sample: RecordedSample
) -> None:
    tokens = slice(span.offset, span.offset + span.length)
    logprobs = np.maximum(sample.top_logprobs[tokens].astype(np.float64), _FLOOR)
    others = np.maximum(1.0 - np.exp(logprobs).sum(1), np.exp(_FLOOR))  # rounding may make it negative
    target_distributions.top_ids[targets] = sample.top_ids[tokens]
    target_distributions.top_logprobs[targets, :-1] = logprobs
    target_distributions.top_logprobs[targets, -1] = np.log(others)
