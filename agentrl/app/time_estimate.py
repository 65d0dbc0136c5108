"""Predicts the seconds of a training step before a run, for the embedded engine on CPUs.

The run's own trainer and engine load the model and compute a few random tokens. A step takes the sum over its tokens;
tools, waits and what the loop itself does (6% of a step of SmolLM2) are left out.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from agentrl.app.engines import engine_program
from agentrl.app.policies import serves_only_adapters
from agentrl.core import machine
from agentrl.core.errors import PredictionError
from agentrl.core.ports import GenerateRequest, SamplingParams
from agentrl.core.records import PolicyVersion
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.learn.models import PolicyModel
from agentrl.learn.publish import CanaryBuilder, Publisher
from agentrl.learn.time_measurement import Clock, TrainerSeconds, measure_trainer

if TYPE_CHECKING:
    from agentrl.config.run import RunConfig

_CONTEXT, _SAMPLED = 16, 4
"""Tokens of a measured conversation: its context, and what it samples after the first token."""


class TokenSeconds(NamedTuple):
    """What the parts of a step take, in seconds."""

    sampling_pass: float
    """A forward pass of the engine that samples a token for each conversation, without any conversation."""
    sampled: float
    """Each conversation in such a pass."""
    context: float
    """A token of a conversation's context."""
    forwarded: float
    """A token in the trainer's forward and backward pass."""
    trained: float
    """A trained token, in addition."""
    update: float
    """The optimizer's update, and the new version until the engine serves it."""

    def step(self, *, passes: int, sampled: int, context: int, forwarded: int, trained: int) -> float:
        """Return the seconds of a step with so many passes that sample, and tokens of each kind."""
        counts = (passes, sampled, context, forwarded, trained, 1)
        return sum(seconds * count for seconds, count in zip(self, counts, strict=True))

    def longest_step(self, *, episodes: int, slots: int, context: int, sampled: int) -> float:
        """Return the seconds of a step whose episodes have so many tokens each, none of which are shared."""
        tokens = context + sampled
        return self.step(
            passes=sampled * math.ceil(episodes / slots),
            sampled=sampled * episodes,
            context=context * episodes,
            forwarded=tokens * episodes,
            trained=sampled * episodes,
        )


def measure_token_seconds(config: RunConfig, clock: Clock) -> TokenSeconds:
    """Measure what a policy's tokens take on this machine, with its present load.

    Args:
        config: configuration of the run, with local model directories and all settings chosen.
        clock: what is measured: elapsed time, or CPU time.

    Raises:
        PredictionError: the run does not compute on CPUs with the embedded engine, or trains several base models.
        ModelError: the directory holds no model that can be trained and served.
    """
    plan, bases = config.trainer_plan, config.engine_plan.bases
    if config.engine.kind != "embedded" or config.on_cluster or (machine.gpus() and not config.stays_on_cpu):
        raise PredictionError("the time of a step is predicted for the embedded engine on CPUs")
    if len(bases) != 1 or not plan.policies:
        raise PredictionError("the time of a step is predicted for one base model with a policy that learns")
    name, model, trainer = measure_trainer(plan, clock)
    program = engine_program(config.engine_plan, bases[0])
    shares = serves_only_adapters(bases[0].policies)
    engine = EmbeddedEngine.load(versions={name: PolicyVersion(name, 0, 0)}, shares_weights=shares, **program.arguments)
    with tempfile.TemporaryDirectory(prefix="agentrl-version-") as directory:
        publisher = Publisher(Path(directory), plan.model, publish=plan.publish)
        return asyncio.run(_with_engine(engine, publisher, name, model, clock, trainer))


async def _with_engine(
    engine: EmbeddedEngine,
    publisher: Publisher,
    name: str,
    model: PolicyModel,
    clock: Clock,
    trainer: TrainerSeconds,
) -> TokenSeconds:
    """Measure the engine, too, and close it."""
    try:
        canaries = CanaryBuilder(model, max_context=engine.capabilities.max_context)
        began = clock()
        await engine.serve([publisher.publish(PolicyVersion(name, 0, 1), model, canaries.of(model))])
        served_s = clock() - began
        vocabulary, numbers = int(model.model.config.get_text_config().vocab_size), count()

        async def seconds(rows: int, tokens: int) -> float:
            """Play conversations with random contexts, which share nothing."""
            contexts = np.random.default_rng(next(numbers)).integers(0, vocabulary, (rows, _CONTEXT)).astype(np.int32)
            sessions = [engine.open(f"{next(numbers)}", name) for _ in contexts]
            sampling = SamplingParams(max_tokens=tokens)
            calls = [
                session.generate(GenerateRequest(request_id=f"{n}", token_ids=context, sampling=sampling, seed=n))
                for session, context, n in zip(sessions, contexts, numbers, strict=False)
            ]
            began = clock()
            await asyncio.gather(*calls)
            passed_s = clock() - began
            for session in sessions:
                session.close()
            return passed_s

        few, many = 2, min(16, engine.capabilities.places)
        await seconds(few, 2)  # prepares kernels
        context_s = await seconds(many, 1)
        few_s = (await seconds(few, 1 + _SAMPLED) - await seconds(few, 1)) / _SAMPLED
        many_s = (await seconds(many, 1 + _SAMPLED) - context_s) / _SAMPLED
        sampled = max(many_s - few_s, 0.0) / max(many - few, 1)
        return TokenSeconds(
            sampling_pass=max(few_s - few * sampled, 0.0),
            sampled=sampled,
            context=context_s / (many * _CONTEXT),
            forwarded=trainer.forwarded,
            trained=trainer.trained,
            update=trainer.update + served_s,
        )
    finally:
        await engine.close()
