"""What the trainer's log-probabilities owe to recorded experts and kept sets: engine and trainer on the same weights.

Episodes of three turns are sampled by the embedded engine, written as journal entries, read back as training rows, and
forwarded by the trainer's own pass, with and without what was recorded. Figures:
  routing_differs_without  positions whose experts are not the recorded ones in some layer: bf16 engine, float32 trainer
  routing_differs_with     the same with routing replay
  k3_with_over_without     k3 of the tokens predicted from the former positions, with replay over without
  mask_max_dlogp           largest |trainer logprob - recorded logprob| with kept sets: top-k 20, top-p 0.9, float32
  refresh_k3_lazy          k3 of the tokens that the weights being trained had sampled, in runs of the calculator's task
                           with an adapter and a large learning rate: `lazy` refresh, the default
  refresh_k3_recomputed    the same under `token` refresh, keys and values of older weights computed again
  refresh_k3_kept          the same, and they are kept (`token_keep_kv`): what an `engine_mismatch` alarm is about
The k3 of all tokens, and the bias that kept sets remove, are shown beside. The model is a random Qwen3-MoE (8 experts,
top 2) whose weights are drawn six times as wide as usual, so that its experts differ as trained ones do.

    python -m benchmarks.mismatch [--quick] [--seed N]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers

import agentrl
from agentrl.config.policies import PolicyConfig
from agentrl.config.run import RunConfig
from agentrl.config.sections import EngineConfig, EnvironmentConfig, ModelConfig
from agentrl.core.ports import Engine, GenerateRequest, SamplingParams, generate_when_room
from agentrl.core.records import EpisodeDataLocation, PolicyVersion, Trajectory, TrajectoryCredit, Unit
from agentrl.core.tokens import Completion, TrainingSample
from agentrl.credit.samples import unit_samples as unit_samples
from agentrl.engines.embedded.capture import chosen_experts, find_routers
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.journal.entries import BeginEntry, EntryBody, JournalEntry, TurnEntry, encode_body
from agentrl.journal.rows import assemble_trajectories
from agentrl.learn.forward import token_logprobs
from agentrl.learn.models import PolicyModel, load_models
from agentrl.learn.packing import pack
from agentrl.learn.step_columns import mismatch_metrics
from benchmarks.report import Report

if TYPE_CHECKING:
    from numpy.typing import NDArray

START = PolicyVersion("policy", 0, 0)
PROMPT, TURNS, NEW = 24, 3, 16
VOCABULARY = 256
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "initializer_range": 0.12,
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
}


def write_model(directory: Path, seed: int, **shape: int) -> Path:
    """A random Qwen3-MoE, float32."""
    torch.manual_seed(seed)
    transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**{**SHAPE, **shape})).save_pretrained(directory)
    return directory


async def sampled(model: Path, *, episodes: int, dtype: str, sampling: SamplingParams) -> list[list[Trajectory]]:
    """Episodes that the embedded engine samples; see `episodes_of`."""
    engine = EmbeddedEngine.load(
        str(model),
        versions={"policy": START},
        slots=16,
        max_context=256,
        dtype=dtype,
        capture_routing=True,
        capture_mask=True,
    )
    found = await episodes_of(engine, episodes=episodes, sampling=sampling)
    await engine.close()
    return found


async def episodes_of(engine: Engine, *, episodes: int, sampling: SamplingParams) -> list[list[Trajectory]]:
    """The trajectories of each episode, as a trainer reads them from the journal."""

    async def episode(number: int) -> list[Trajectory]:
        session, random = engine.open(f"e{number}", "policy"), np.random.default_rng(number)
        context = np.zeros(0, np.int32)
        bodies: list[EntryBody] = [
            BeginEntry("mismatch", "", f"t{number}", {}, number, {"agent": "policy"}, "train", "g", 1, None)
        ]
        for turn in range(TURNS):
            before = len(context)
            observed = random.integers(3, VOCABULARY, PROMPT if turn == 0 else 4).astype(np.int32)
            context = np.concatenate([context, observed])
            request = GenerateRequest(request_id=f"{number}-{turn}", token_ids=context, sampling=sampling, seed=number)
            completion = await generate_when_room(session, request)
            bodies.append(entry_of(completion, turn=turn, observed=observed, before=before))
            context = np.concatenate([context, completion.token_ids])
        entries = [JournalEntry(f"e{number}", 0, f"r#{at}", b"", encode_body(body)) for at, body in enumerate(bodies)]
        return list(assemble_trajectories(entries))

    return list(await asyncio.gather(*(episode(number) for number in range(episodes))))


def rows_of(episodes: Sequence[Sequence[Trajectory]]) -> list[TrainingSample]:
    """Training rows of episodes, all with advantage 1."""
    credit = TrajectoryCredit("agent", 0, 1.0, 1.0, 0.0)
    found: list[TrainingSample] = []
    for number, trajectories in enumerate(episodes):
        location = EpisodeDataLocation("", 0)
        unit = Unit(episode_id=f"e{number}", attempt=0, policy="policy", location=location, credits=(credit,))
        found.extend(unit_samples(unit, trajectories))
    return found


def entry_of(completion: Completion, *, turn: int, observed: NDArray[np.int32], before: int) -> TurnEntry:
    """A turn's journal entry."""
    assert completion.experts is not None
    return TurnEntry(
        seat="agent",
        index=0,
        policy="policy",
        row=0,
        turn=turn,
        context_ids=observed.tobytes(),
        tokens=completion.encode(),
        finish_reason=completion.finish_reason,
        text="",
        messages=(),
        temperature=1.0,
        seconds=0.0,
        started=0.0,
        parent_context=before,
    )


def trainer_model(path: Path) -> PolicyModel:
    """The model as a run with `capture_routing` trains it."""
    config = RunConfig(
        environment=EnvironmentConfig(id="mismatch"),
        model=ModelConfig(path=str(path)),
        engine=EngineConfig(capture_routing=True),
        policies={"policy": PolicyConfig()},
    )
    return load_models(config.trainer_plan, torch.device("cpu"))["policy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """The trainer's pass over rows, per trained token."""

    trainer: NDArray[np.float32]
    recorded: NDArray[np.float32]
    differs: NDArray[np.bool_]
    """Whether the experts of the position that predicts the token are not those recorded there."""
    positions: int
    """Forwarded positions whose experts differ."""
    forwarded: int

    def k3(self, chosen: NDArray[np.bool_]) -> float:
        """Of some of the tokens."""
        lag = np.zeros(int(chosen.sum()), np.int32)
        found = mismatch_metrics(self.trainer[chosen], self.recorded[chosen], lag=lag, fresh=lag == 0)
        return found.get("mismatch/k3", 0.0)


def forwarded(model: PolicyModel, rows: Sequence[TrainingSample], *, replay: bool) -> Pass:
    """Forward rows as a step does, and look at what the routers chose."""
    trainer, recorded, differs, positions, total = [], [], [], 0, 0
    used: list[torch.Tensor] = []

    def note(module: Any, inputs: Any, output: Any) -> None:
        used.append(chosen_experts(output))

    hooks = [model.model.get_submodule(name).register_forward_hook(note) for name in routers(model)]
    for batch in pack(rows, max_tokens=2048, share=model.shared_prefixes):
        used.clear()
        with torch.no_grad():
            head = token_logprobs(
                model.model, batch, shared=model.shared_prefixes, replay=model.replay if replay else None
            )
        assert batch.expert_routing is not None
        experts = torch.stack(used, dim=1).numpy()
        wrong = (np.sort(experts, axis=-1) != np.sort(batch.expert_routing, axis=-1)).any(axis=(1, 2))
        trainer.append(head.logprob.numpy())
        places = zip(batch.sample, batch.position, strict=True)
        recorded.append(np.array([rows[index].logprobs[at] for index, at in places], np.float32))
        differs.append(wrong[batch.hidden_index])
        positions += int(wrong.sum())
        total += len(wrong)
    for hook in hooks:
        hook.remove()
    return Pass(
        trainer=np.concatenate(trainer),
        recorded=np.concatenate(recorded),
        differs=np.concatenate(differs),
        positions=positions,
        forwarded=total,
    )


def routers(model: PolicyModel) -> tuple[str, ...]:
    """Names of the model's routers; the attention of training needs a tree, so another one looks."""
    kept = model.model.config._attn_implementation
    model.model.set_attn_implementation("sdpa")
    names = find_routers(model.model)
    model.model.set_attn_implementation(kept)
    return names


def routing(model: PolicyModel, rows: Sequence[TrainingSample]) -> dict[str, float]:
    """Figures of routing replay."""
    without, replayed = (forwarded(model, rows, replay=replay) for replay in (False, True))
    at, everywhere = without.differs, np.ones_like(without.differs)
    print(
        f"routing: {without.positions} of {without.forwarded} forwarded positions differ without replay, "
        f"{replayed.positions} with; {int(at.sum())} of {len(at)} trained tokens are predicted from one"
    )
    for words, chosen in (("those tokens", at), ("the other tokens", ~at), ("all tokens", everywhere)):
        before, after = without.k3(chosen), replayed.k3(chosen)
        print(f"  k3 of {words}: {before:.2e} without, {after:.2e} with ({after / before if before else 0:.3f})")
    return {
        "routing_differs_without": float(without.positions),
        "routing_differs_with": float(replayed.positions),
        "k3_with_over_without": replayed.k3(at) / without.k3(at) if at.any() else float("nan"),
    }


def masks(model: PolicyModel, rows: Sequence[TrainingSample]) -> float:
    """Largest difference with kept sets; what their absence would do is printed."""
    unmasked = [row.with_column("kept", None) for row in rows]
    with_sets, without = (forwarded(model, chosen, replay=True) for chosen in (rows, unmasked))
    largest = float(np.abs(with_sets.trainer - with_sets.recorded).max())
    bias = without.trainer - without.recorded
    print(
        f"kept sets (top-k 20, top-p 0.9, float32): largest |Δlogp| {largest:.1e} with; without: mean Δlogp "
        f"{bias.mean():+.3f} nats, largest |Δlogp| {np.abs(bias).max():.2f}, mean ratio {np.exp(bias).mean():.3f}, "
        f"k3 {without.k3(np.ones(len(bias), np.bool_)):.3f}"
    )
    return largest


def refreshed(seed: int, engine: dict[str, Any], directory: Path) -> tuple[float, float, float, float]:
    """A short run: tokens of lag 0, the sum of their k3, the largest difference, the last steps' mean reward."""
    config = {
        "name": "run",
        "directory": str(directory),
        "seed": seed,
        "steps": 12,
        "environment": {"id": "calculator"},
        "model": {"path": "agentrl.environments:calculator/model"},
        "policies": {"solver": {"lora": {"rank": 8}, "learning_rate": 5e-3, "step_size": 64}},
        "sampling": {"max_tokens": 32, "max_turns": 6},
        "engine": {"slots": 96, "max_context": 192, **engine},
        "evaluation": {"tasks": 0},
        "checkpoint": {"every": 0},
    }
    steps = agentrl.train(RunConfig.model_validate(config), quiet=True).metrics
    tokens = [step.get("lag_tokens/0", 0.0) for step in steps]
    total = sum(count * step.get("lag_k3/0", 0.0) for count, step in zip(tokens, steps, strict=True))
    largest = max(step.get("lag_max_difference/0", 0.0) for step in steps)
    return sum(tokens), total, largest, statistics.fmean(step["reward/mean"] for step in steps[-4:])


def refreshes(seeds: range) -> dict[str, float]:
    """k3 of lag 0 by refresh, over the runs of all seeds, which are played by turns."""
    settings: dict[str, dict[str, Any]] = {
        "lazy": {},
        "recomputed": {"refresh": "token"},
        "kept": {"refresh": "token_keep_kv"},
    }
    found: dict[str, list[tuple[float, float, float, float]]] = {name: [] for name in settings}
    for seed in seeds:
        for name, engine in settings.items():
            with tempfile.TemporaryDirectory() as directory:
                found[name].append(refreshed(seed, engine, Path(directory)))
    figures = {}
    for name, runs in found.items():
        tokens = sum(run[0] for run in runs)
        figures[f"refresh_k3_{name}"] = sum(run[1] for run in runs) / tokens if tokens else float("nan")
        each = ", ".join(f"{total / count:.1e}" if count else "none" for count, total, _, _ in runs)
        print(
            f"refresh {name}: k3 of {tokens:.0f} tokens of lag 0 {figures[f'refresh_k3_{name}']:.2e} (by run {each}), "
            f"largest |Δlogp| {max(run[2] for run in runs):.2g}, reward of the last four of 12 steps "
            f"{', '.join(f'{run[3]:.2f}' for run in runs)}",
            flush=True,
        )
    return figures


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one model instead of three, fewer episodes")
    parser.add_argument("--seed", type=int, default=0, help="of the first model")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    repeats, episodes = (1, 24) if arguments.quick else (3, 96)
    figures: list[dict[str, float]] = []
    for seed in range(arguments.seed, arguments.seed + repeats):
        with tempfile.TemporaryDirectory() as directory:
            path = write_model(Path(directory), seed)
            model = trainer_model(path)
            plain = SamplingParams(max_tokens=NEW)
            found_episodes = asyncio.run(sampled(path, episodes=episodes, dtype="bfloat16", sampling=plain))
            found = routing(model, rows_of(found_episodes))
            filtered = SamplingParams(max_tokens=NEW, top_k=20, top_p=0.9)
            rows = rows_of(asyncio.run(sampled(path, episodes=episodes, dtype="float32", sampling=filtered)))
            figures.append({**found, "mask_max_dlogp": masks(model, rows)})
    report = Report("mismatch", quick=arguments.quick, repeats=repeats, compared_with="the same pass without records")
    report.figures = {name: statistics.median(each[name] for each in figures) for name in figures[0]}
    report.figures["mask_max_dlogp"] = max(each["mask_max_dlogp"] for each in figures)
    report.figures["routing_differs_with"] = max(each["routing_differs_with"] for each in figures)
    names = ("refresh_k3_lazy", "refresh_k3_recomputed", "refresh_k3_kept")
    seeds = range(arguments.seed, arguments.seed + 5)
    report.figures |= dict.fromkeys(names) if arguments.quick else refreshes(seeds)
    report.print()


if __name__ == "__main__":
    main()
