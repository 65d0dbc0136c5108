"""Samples for clients: checks of their requests, and answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from agentrl.parts import ClientSampler, Completion, InputError, SamplingParams, WeightsRef, stable_hash64
from agentrl_tinker.messages import Sample, Sampling, write_samples, write_top
from agentrl_tinker.stability import TOP_TOKENS

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_SAMPLES = 1024
"""Maximum number of samples of one request."""
MAX_SAMPLED_TOKENS = 1 << 22
"""Maximum number of tokens that one request may sample."""
MIN_TEMPERATURE = 1e-6
"""Minimum temperature above 0, at which logits are divided; its inverse is the maximum."""
MAX_TOP_CELLS = 1 << 20
"""Maximum number of the likeliest tokens in one answer to a client or of the engine, over all positions: 8 MiB."""
MAX_STOPS = 64
"""Maximum number of stop texts or tokens of one request."""


def check_sample(request: Sample, *, max_context: int, vocabulary: int) -> None:
    """Refuse a request for samples that no engine could answer.

    Raises:
        InputError: the message says what to change.
    """
    if any(chunk.type != "encoded_text" for chunk in request.prompt.chunks):
        raise InputError("prompt: only tokens are served here, not images or audio")
    tokens = prompt_tokens(request)
    if not len(tokens):
        raise InputError("prompt: it has no tokens")
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary:
        raise InputError(f"prompt: a token lies outside the vocabulary, [0, {vocabulary})")
    if len(tokens) >= max_context:
        raise InputError(f"prompt: {len(tokens)} tokens, but this server's contexts have at most {max_context}")
    if not 1 <= request.num_samples <= MAX_SAMPLES:
        raise InputError(f"num_samples = {request.num_samples}: from 1 to {MAX_SAMPLES} are possible")
    _check_sampling(request.sampling_params, vocabulary)
    last = request.prompt_logprobs_last_n
    if last is not None and not (request.prompt_logprobs and 1 <= last < len(tokens)):
        raise InputError(f"prompt_logprobs_last_n = {last}: needs prompt_logprobs, and fewer tokens than the prompt")
    room = max_context - len(tokens)
    sampled = min(request.sampling_params.max_tokens or room, room)
    if request.num_samples * sampled > MAX_SAMPLED_TOKENS:
        raise InputError(
            f"{request.num_samples} samples of up to {sampled} tokens: at most {MAX_SAMPLED_TOKENS} tokens are "
            "possible in one request; lower num_samples or max_tokens"
        )
    computed = len(tokens) + sampled  # for one sample at a time, at its prompt too
    for name, count, positions in (
        ("topk_prompt_logprobs", request.topk_prompt_logprobs, len(tokens)),
        ("topk_sample_logprobs", request.topk_sample_logprobs, max(request.num_samples * sampled, computed)),
    ):
        if not 0 <= count * positions <= MAX_TOP_CELLS:
            raise InputError(
                f"{name} = {count}: for {positions} tokens, from 0 to {MAX_TOP_CELLS // positions} are possible"
            )
    if request.record_stability_info:
        _check_stability(request.sampling_params, max(request.num_samples * sampled, computed))


def _check_stability(sampling: Sampling, positions: int) -> None:
    """Refuse to record distributions that are cut, whose likeliest tokens say nothing of the others, or too many."""
    if sampling.temperature == 0 or sampling.top_k > 0 or sampling.top_p != 1:
        raise InputError(
            "record_stability_info: the whole distribution must be sampled; set a temperature above 0, top_k = -1 and "
            "top_p = 1, or sample with a client that does not record"
        )
    if positions * TOP_TOKENS > MAX_TOP_CELLS:
        raise InputError(
            f"record_stability_info: {positions} tokens in one request, but at most {MAX_TOP_CELLS // TOP_TOKENS} are "
            "possible; lower num_samples or max_tokens"
        )


def _check_sampling(sampling: Sampling, vocabulary: int) -> None:
    if sampling.max_tokens is not None and sampling.max_tokens < 1:
        raise InputError(f"sampling_params.max_tokens = {sampling.max_tokens}: at least 1 is needed")
    if sampling.temperature and not MIN_TEMPERATURE <= sampling.temperature <= 1 / MIN_TEMPERATURE:
        raise InputError(
            f"sampling_params.temperature = {sampling.temperature}: 0, or from {MIN_TEMPERATURE} to "
            f"{1 / MIN_TEMPERATURE:.0f}, is possible"
        )
    if not -1 <= sampling.top_k < 1 << 31:
        raise InputError("sampling_params.top_k: -1, 0 (all tokens) or a positive 32-bit number is possible")
    if not 0 < sampling.top_p <= 1:
        raise InputError(f"sampling_params.top_p = {sampling.top_p}: it must be above 0 and at most 1")
    stops = _stops(sampling)
    if len(stops) > MAX_STOPS or "" in stops:
        raise InputError(f"sampling_params.stop: at most {MAX_STOPS} tokens or texts, none of them empty")
    if len({type(stop) for stop in stops}) > 1:
        raise InputError("sampling_params.stop: either tokens or texts, not both")
    if not all(0 <= stop < vocabulary for stop in stops if isinstance(stop, int)):
        raise InputError(f"sampling_params.stop: a token lies outside the vocabulary, [0, {vocabulary})")


def _stops(sampling: Sampling) -> list[str | int]:
    """Return the texts or tokens that end a sample."""
    return [sampling.stop] if isinstance(sampling.stop, str) else sampling.stop or []


def prompt_tokens(request: Sample) -> NDArray[np.int32]:
    """Return the tokens of a prompt.

    Raises:
        InputError: one is no 32-bit number.
    """
    try:
        return np.array([token for chunk in request.prompt.chunks for token in chunk.tokens], np.int32)
    except OverflowError:
        raise InputError("prompt: a token lies outside the vocabulary") from None


async def answer_sample(
    sampler: ClientSampler,
    request_id: str,
    request: Sample,
    weights: WeightsRef | str,
    origin: Mapping[str, str],
    seed: int,
    recorded: Sequence[Completion] | None,
) -> bytes:
    """Sample what a checked request asks for, and return the encoded answer.

    Args:
        sampler: samples and records.
        request_id: id of the request.
        request: the request.
        weights: weights that sample.
        origin: data of the recorded tasks.
        seed: seed of samples without one.
        recorded: samples that a killed process recorded.
    """
    tokens, samples = prompt_tokens(request), recorded
    temperature = request.sampling_params.temperature or 1.0
    if samples is None:
        stops = _stops(request.sampling_params)
        texts = [stop for stop in stops if isinstance(stop, str)]
        stop = None if request.sampling_params.stop is None else texts
        keys = (seed, request_id) if request.sampling_params.seed is None else ("seed", request.sampling_params.seed)
        seeds = [stable_hash64(*keys, number) for number in range(request.num_samples)]
        params = _sampling(request, sampler.max_context - len(tokens))
        samples = await sampler.sample(request_id, weights, tokens, params, seeds, stop, origin)

    async def top_of(sample: Completion, count: int, temperature: float) -> Any:
        """Compute and write the likeliest tokens at each token of a sample."""
        scores = await sampler.score(weights, np.concatenate([tokens, sample.token_ids]), temperature, top=count)
        ids, logprobs = scores.top_ids[len(tokens) :], scores.top_logprobs[len(tokens) :]
        return write_top(ids, logprobs, width=count, empty_rows=0)

    prompt_logprobs, prompt_top = None, None
    if request.prompt_logprobs or request.topk_prompt_logprobs:
        count = request.topk_prompt_logprobs
        scores = await sampler.score(weights, tokens, top=count)
        first = len(tokens) - (request.prompt_logprobs_last_n or len(tokens) - 1)
        if request.prompt_logprobs:
            prompt_logprobs = scores.logprobs.copy()
            prompt_logprobs[:first] = np.nan
        if count:
            prompt_top = write_top(scores.top_ids, scores.top_logprobs, width=count, empty_rows=first)
    tops = stability_info = [None] * len(samples)
    if request.topk_sample_logprobs:
        tops = [await top_of(one, request.topk_sample_logprobs, 1.0) for one in samples]
    if request.record_stability_info:
        stability_info = [await top_of(one, TOP_TOKENS, temperature) for one in samples]
    return write_samples(samples, tops, prompt_logprobs, prompt_top, stability_info)


def _sampling(request: Sample, room: int) -> SamplingParams:
    """Return the engine's parameters."""
    sampling = request.sampling_params
    if request.topk_sample_logprobs or request.record_stability_info:
        room -= 1  # vLLM scores no sequence that fills the context
    is_greedy = sampling.temperature == 0
    return SamplingParams(
        max_tokens=min(sampling.max_tokens or room, room),
        temperature=1.0 if is_greedy else sampling.temperature,
        top_k=1 if is_greedy else max(0, sampling.top_k),
        top_p=sampling.top_p,
        stop_token_ids=tuple(stop for stop in _stops(sampling) if isinstance(stop, int)),
    )
