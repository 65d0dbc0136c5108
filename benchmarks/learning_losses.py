"""Losses and advantages against other packages' numbers, split in every way, and a user's own under Ray: a part of
`benchmarks.learning`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agentrl.config.run import RunConfig
from agentrl.config.sections import LossConfig, TrainerConfig
from agentrl.core.custom_functions import capture_function_code
from agentrl.core.errors import ConfigError, TrainerError
from agentrl.core.records import PolicyVersion, StepReport, TrajectoryRow
from agentrl.credit.advantages.gae import generalized_advantages
from agentrl.credit.estimators import REWARD_ESTIMATORS
from agentrl.learn.loss_batch import LossBatch
from agentrl.learn.losses import kl_divergence, make_loss
from agentrl.learn.ranks import RankGroup
from agentrl.learn.step_columns import IDS, TokenColumns
from agentrl.learn.trainer import PolicyTrainer
from benchmarks import learning_sapo
from tests.learn_cases import Episodes, make_rows, run_config, write_model, write_tokenizer
from tests.rank_processes import on_ranks

SEQUENCE_CLIP = {"clip_low": 0.05, "clip_high": 0.1}
OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("ppo", {"dual_clip": 1e9}),
    "bnpo": ("ppo", {"dual_clip": 1e9}),
    "dr_grpo": ("ppo", {"dual_clip": 1e9}),
    "dapo": ("ppo", {"dual_clip": 1e9}),
    "dapo_delta": ("ppo", {"dual_clip": 3.0}),
    "grpo_delta": ("ppo", {"dual_clip": 3.0}),
    "gspo": ("gspo", SEQUENCE_CLIP),
    "luspo": ("gspo", SEQUENCE_CLIP),
    "cispo": ("cispo", {"max_ratio": 1.2}),
    "sapo": ("sapo", {}),
    "vespo": ("vespo", {}),
}
"""Our name and options by the recorded case."""
TRL_WEIGHTS = {
    **dict.fromkeys(("grpo", "grpo_delta", "gspo", "sapo"), "sequence_mean"),
    "dr_grpo": "longest",
    "luspo": "sequences",
}
"""The divisors of TRL's cases; of the others: the step's tokens."""


def recorded(package: str) -> dict[str, Any]:
    """The numbers of other packages: `trl`, or `others`, which `benchmarks.learning_record` writes."""
    path = Path(__file__).with_name(f"learning_{package}.json")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def oracle_errors() -> dict[str, float]:
    """The relative errors of value and gradient, by `package: case, what`."""
    trl = recorded("trl")
    found: dict[str, float] = {}
    for case in trl["cases"]:
        name, options = OURS[case["case"]]
        if case["threshold"] is not None:
            name, options = "off_policy_mask", {**options, "threshold": case["threshold"]}
        ours = {"name": name, "options": options, "kl": case["kl"], "weights": TRL_WEIGHTS.get(case["case"], "tokens")}
        label = f"trl: {case['case']}, kl {case['kl']}, threshold {case['threshold']}"
        found |= _compared(label, ours, case, trl["rows"], trl["max_completion_length"])
    longest = max(len(row["logprobs"]) for row in trl["rows"])
    for package in recorded("others")["packages"]:
        for case in package["cases"]:
            found |= _compared(f"{package['package']}: {case['case']}", case["ours"], case, trl["rows"], longest)
        for case in package["advantages"]:
            advantages: list[float] = []
            for group in dict.fromkeys(case["groups"]):
                own = [r for r, name in zip(case["rewards"], case["groups"], strict=True) if name == group]
                advantages += [each.value for each in REWARD_ESTIMATORS[case["ours"]](own, range(len(own)))]
            found[f"{package['package']}: {case['case']} as {case['ours']}"] = _error(advantages, case["advantages"])
        for case in package["values"]:
            found[f"{package['package']}: {case['case']}"] = max(_gae_error(case, row) for row in case["rows"])
    return found


def _gae_error(case: dict[str, Any], row: dict[str, list[float]]) -> float:
    """The relative error of our advantages of a row whose tokens are turns of their own."""
    to_go, count = np.cumsum(row["rewards"][::-1])[::-1].tolist(), len(row["values"])
    options = {name: case[name] for name in ("discount", "trace_decay")}
    ours = generalized_advantages(to_go, row["values"], [0] * count, range(count), **options)
    return _error(ours.advantages, row["advantages"])


def _compared(
    label: str, ours: dict[str, Any], case: dict[str, Any], rows: list[dict[str, Any]], longest: int
) -> dict[str, float]:
    """The errors of our loss in a recorded case."""
    lengths = np.array([len(row["logprobs"]) for row in rows])
    number = np.repeat(np.arange(len(rows)), lengths)
    columns = TokenColumns(
        behavior_logprobs=np.concatenate([row["behavior"] for row in rows]),
        advantages=np.repeat([row["advantage"] for row in rows], lengths),
        lags=np.full(len(number), ours.get("lags", 0), np.int32),
        names={"seat": ["agent"], "group": ["g0"]},
        starts=np.concatenate([[0], np.cumsum(lengths)]),
        **dict.fromkeys(IDS, number),
    )
    logprobs = torch.tensor(np.concatenate([row["logprobs"] for row in rows]), requires_grad=True)
    reference = torch.tensor(np.concatenate([row["reference"] for row in rows]))
    weights = torch.tensor(_weights(ours.get("weights", "tokens"), lengths, longest))
    if "estimator" in ours:
        away = kl_divergence(logprobs, reference, estimator=ours["estimator"]) * weights
        loss, gradient = away.detach(), torch.autograd.grad(away.sum(), logprobs)[0]
    else:
        config = {name: ours[name] for name in ("name", "kl") if name in ours} | ours.get("options", {})
        batch = LossBatch(
            columns,
            logprobs=logprobs,
            entropies=torch.zeros(len(number), dtype=torch.float64, requires_grad=True),
            reference_logprobs=reference,
        )
        found = make_loss(TrainerConfig(loss=LossConfig(**config))).evaluate(batch, weights)
        loss, gradient = found.loss, found.by_logprob
    recorded_gradient = np.concatenate(case["gradient"]) if isinstance(case["gradient"][0], list) else case["gradient"]
    errors = {f"{label}, gradient": _error(gradient.tolist(), recorded_gradient)}
    if "gradient_only" not in ours:
        errors[f"{label}, value"] = _error([float(loss.sum())], [case["loss"]])
    return errors


def _error(found: Sequence[float], expected: Any) -> float:
    """The largest difference, relative to the largest entry."""
    return float(np.abs(np.array(found) - expected).max() / max(np.abs(expected).max(), 1e-12))


def _weights(kind: str, lengths: np.ndarray[Any, Any], longest: int) -> np.ndarray[Any, Any]:
    """Return the factor by which the other library multiplies each token's loss: the trainer's normalizer."""
    tokens = np.repeat(lengths, lengths).astype(float)
    if kind == "sequence_mean":
        return 1 / (len(lengths) * tokens)
    divisor = {"tokens": int(lengths.sum()), "sequences": len(lengths), "longest": len(lengths) * longest}[kind]
    return np.full(len(tokens), 1 / divisor)


def step(
    config: RunConfig, directory: Path, *, forked: bool = False, precise: bool = False, ranks: RankGroup | None = None
) -> tuple[float, float]:
    """Loss and gradient norm of a step in this process.

    Args:
        config: of the run.
        directory: of the run.
        forked: whether each trained token has a row of its own, with the tokens before it.
        precise: compute in float64, so that nothing but the splitting can differ.
        ranks: the data-parallel group; None: alone.
    """
    episodes = Episodes(make_rows(0, 12))
    if forked:
        episodes.trajectories = [replace(each, rows=_forked(each.rows[0])) for each in episodes.trajectories]
    trainer = PolicyTrainer(config, directory, read=episodes.read, ranks=ranks)
    trainer.start()
    if precise:
        for learner in trainer._learners.values():
            learner.model.model.double()
    trainer.forward_backward(episodes.batch())
    report = trainer.optim_step("policy", 1)
    return report.loss, report.grad_norm


def _forked(row: TrajectoryRow) -> tuple[TrajectoryRow, ...]:
    """The row as often as it has trained tokens, each cut behind the one that it trains."""
    found = []
    for at in np.flatnonzero(row.loss_mask):
        mask = np.arange(at + 1) == at
        behavior = np.where(mask, row.behavior_logprobs[: at + 1], np.float32(0))
        turns = np.where(mask, row.turn_index[: at + 1], -1)
        tokens = row.token_ids[: at + 1]
        found.append(replace(row, token_ids=tokens, loss_mask=mask, behavior_logprobs=behavior, turn_index=turns))
    return tuple(found)


SPLIT = [
    *((name, {}, "tokens") for name in ("gspo", "topr", "kl_cov", "m2po")),
    ("importance_sampling", {"level": "agent"}, "tokens"),
    *((name, {}, "sequences") for name in ("ppo", "gspo")),
    ("truncated", {}, "tokens"),
]
"""Losses that see a whole step or a token, with their options, and the normalizer."""


def split_step(
    ranks: RankGroup | None, model: str, directory: str, tokens: int, forked: bool
) -> list[tuple[float, float]]:
    """Loss and gradient norm in each case of `SPLIT`, over some ranks."""
    found = []
    for number, (name, options, normalizer) in enumerate(SPLIT):
        loss = {"name": name, "normalizer": normalizer, **options}
        config = run_config(Path(model), loss=loss, micro_batch_tokens=tokens)
        path = Path(directory) / f"{number}-{tokens}-{forked}-{ranks.size if ranks is not None else 0}"
        found.append(step(config, path, forked=forked, precise=True, ranks=ranks))
    return found


def splitting_error(model: Path, directory: Path) -> float:
    """The largest relative difference between one micro-batch of one rank, and a step that is split otherwise."""
    given = (str(model), str(directory))
    whole = split_step(None, *given, 1 << 14, False)
    others = [split_step(None, *given, tokens, forked) for tokens, forked in ((32, False), (1 << 14, True), (64, True))]
    others += on_ranks(2, "benchmarks.learning_losses:split_step", *given, 64, False)
    return max(
        abs(a - b) / max(abs(a), 1e-9)
        for other in others
        for one, two in zip(whole, other, strict=True)
        for a, b in zip(one, two, strict=True)
    )


async def under_ray(model: Path, directory: Path) -> bool:
    """Whether a rank runs the code that was given, and no other."""
    os.environ.setdefault("RAY_worker_niceness", "0")  # with Ray's 15, a rank starves where anything else runs
    from agentrl.cluster.trainer_pool import RayTrainerPool

    async def one(name: str) -> StepReport:
        episodes = Episodes(make_rows(0, 12))
        path = directory / f"ray-{name}"
        await episodes.write(path)
        config = run_config(model, ranks=1, loss={"name": f"{learning_sapo.__file__}:{name}"})
        pool = RayTrainerPool(config, path)
        try:
            await pool.start()
            await pool.publish("policy", PolicyVersion("policy", 0, 0))
            await pool.forward_backward(episodes.batch())
            return await pool.optim_step("policy", 1)
        finally:
            await pool.close()

    report = await one("sapo")
    here = step(run_config(model, loss={"name": f"{learning_sapo.__file__}:sapo"}), directory / "here")
    same = abs(report.loss - here[0]) <= 1e-6 and abs(report.grad_norm - here[1]) <= 1e-5 * here[1]
    try:
        await one("raises")
    except TrainerError as error:
        raised = "as asked" in str(error)
    else:
        raised = False
    given, learning_sapo.sapo = learning_sapo.sapo, learning_sapo.raises
    try:
        learning_sapo.sapo.__qualname__, name = "sapo", learning_sapo.sapo.__qualname__
        capture_function_code(learning_sapo.sapo, "loss", key="loss")
        refused = False
    except ConfigError:
        refused = True
    finally:
        learning_sapo.sapo.__qualname__ = name
        learning_sapo.sapo = given
    return same and raised and refused


def figures(quick: bool) -> dict[str, float | None]:
    errors = oracle_errors()
    source = inspect.getsource(learning_sapo.sapo).splitlines()
    with tempfile.TemporaryDirectory() as place:
        model = write_model(Path(place) / "model")
        write_tokenizer(model)
        torch.set_num_threads(1)
        return {
            "oracle_pairs": len(errors),
            "oracle_max_error": max(errors.values()),
            "lines_sapo": len(source) + len(("import torch", "import agentrl", "agentrl.train(config, loss=sapo)")),
            "splitting_error": splitting_error(model, Path(place)),
            "user_loss_under_ray": None if quick else float(asyncio.run(under_ray(model, Path(place)))),
        }
