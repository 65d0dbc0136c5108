"""Losses: against another library's numbers, split in every way, and a user's own under Ray.

    python -m benchmarks.learning [--quick]

`oracle_pairs`: losses of TRL that were computed by its own code, in float64 over ragged masks, and recorded with its
version (`learning_trl.json`: what `GRPOTrainer._compute_loss` returned for given log-probabilities, and its gradient);
value and gradient count as one pair each. `oracle_max_error` is the largest difference of ours, relative to the largest
entry. `splitting_error`: the largest relative difference of a step's loss and gradient norm, in one micro-batch and in
many, over losses that see a whole step and normalisers. `lines_sapo`: lines of a script that trains with its own loss.
`user_loss_under_ray`: 1 if a loss that raises does so by name in a rank, one that is right trains as in this process,
and one patched by hand is refused.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agentrl.config.run import LossConfig, RunConfig, TrainerConfig
from agentrl.core.errors import ConfigError, TrainerError
from agentrl.core.functions import describe
from agentrl.core.records import PolicyVersion, StepReport
from agentrl.learn.loss_batch import IDS, LossBatch, TokenColumns
from agentrl.learn.losses import make_loss
from agentrl.learn.trainer import PolicyTrainer
from benchmarks import learning_sapo
from benchmarks.report import Report
from tests.learn_cases import Episodes, make_rows, run_config, write_model, write_tokenizer

FIGURES = ("oracle_pairs", "oracle_max_error", "splitting_error", "lines_sapo", "user_loss_under_ray")

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
SEQUENCE_MEANS = ("grpo", "grpo_delta", "gspo", "sapo")
"""Cases that TRL divides by the length of each sequence."""


def recorded() -> dict[str, Any]:
    """The numbers of TRL."""
    found: dict[str, Any] = json.loads(Path(__file__).with_name("learning_trl.json").read_text(encoding="utf-8"))
    return found


def oracle_errors() -> list[float]:
    """The relative errors of value and gradient, case by case."""
    numbers = recorded()
    rows = numbers["rows"]
    lengths = np.array([len(row["logprobs"]) for row in rows])
    number = np.repeat(np.arange(len(rows)), lengths)
    columns = TokenColumns(
        behavior_logprobs=np.concatenate([row["behavior"] for row in rows]),
        advantages=np.repeat([row["advantage"] for row in rows], lengths),
        lags=np.zeros(len(number), np.int32),
        names={"seat": ["agent"], "group": ["g0"]},
        starts=np.concatenate([[0], np.cumsum(lengths)]),
        **dict.fromkeys(IDS, number),
    )
    errors = []
    for case in numbers["cases"]:
        name, options = OURS[case["case"]]
        if case["threshold"] is not None:
            name, options = "off_policy_mask", {**options, "threshold": case["threshold"]}
        loss = make_loss(TrainerConfig(loss=LossConfig(name=name, options=options, kl=case["kl"])))
        batch = LossBatch(
            columns,
            logprobs=torch.tensor(np.concatenate([row["logprobs"] for row in rows]), requires_grad=True),
            entropies=torch.zeros(len(number), dtype=torch.float64, requires_grad=True),
            reference_logprobs=torch.tensor(np.concatenate([row["reference"] for row in rows])),
        )
        found = loss.evaluate(batch, torch.tensor(weights(case["case"], lengths, numbers["max_completion_length"])))
        expected = np.concatenate(case["gradient"])
        errors.append(abs(float(found.loss.sum()) - case["loss"]) / max(abs(case["loss"]), 1e-12))
        errors.append(float(np.abs(found.by_logprob.numpy() - expected).max() / np.abs(expected).max()))
    return errors


def weights(case: str, lengths: np.ndarray[Any, Any], longest: int) -> np.ndarray[Any, Any]:
    """What TRL multiplies each token's loss by: the trainer's normalisers."""
    tokens = np.repeat(lengths, lengths).astype(float)
    if case in SEQUENCE_MEANS:
        return 1 / (len(lengths) * tokens)
    divisor = {"dr_grpo": len(lengths) * longest, "luspo": len(lengths)}.get(case, int(lengths.sum()))
    return np.full(len(tokens), 1 / divisor)


def step(config: RunConfig, directory: Path) -> tuple[float, float]:
    """Loss and gradient norm of a step in this process."""
    episodes = Episodes(make_rows(0, 12))
    trainer = PolicyTrainer(config, directory, read=episodes.read)
    trainer.start()
    trainer.forward_backward(episodes.batch())
    report = trainer.optim_step("policy", 1)
    return report.loss, report.grad_norm


def splitting_error(model: Path, directory: Path) -> float:
    """The largest relative difference between one micro-batch and many."""
    worst = 0.0
    cases = [(name, False) for name in ("gspo", "topr", "kl_cov", "importance_sampling")] + [
        ("ppo", True),
        ("gspo", True),
    ]
    for number, (name, sequence_mean) in enumerate(cases):
        options = {"level": "agent"} if name == "importance_sampling" else {}
        loss = {"name": name, "options": options, "sequence_mean": sequence_mean}
        whole, split = (
            step(run_config(model, loss=loss, micro_batch_tokens=tokens), directory / f"{number}-{tokens}")
            for tokens in (1 << 14, 32)
        )
        worst = max(worst, *(abs(a - b) / max(abs(a), 1e-9) for a, b in zip(whole, split, strict=True)))
    return worst


async def under_ray(model: Path, directory: Path) -> bool:
    """Whether a rank runs the code that was given, and no other."""
    from agentrl.cluster.trainer_pool import RayTrainerPool

    async def one(name: str) -> StepReport:
        episodes = Episodes(make_rows(0, 12))
        path = directory / f"ray-{name}"
        await episodes.write(path)
        config = run_config(model, kind="ray", workers=1, loss={"name": f"{learning_sapo.__file__}:{name}"})
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
        describe(learning_sapo.sapo, "loss", key="loss")
        refused = False
    except ConfigError:
        refused = True
    finally:
        learning_sapo.sapo.__qualname__ = name
        learning_sapo.sapo = given
    return same and raised and refused


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    report = Report("learning", quick=quick, repeats=1, compared_with=f"trl {recorded()['version']}")
    errors = oracle_errors()
    source = inspect.getsource(learning_sapo.sapo).splitlines()
    report.figures = {
        "oracle_pairs": len(errors),
        "oracle_max_error": max(errors),
        "lines_sapo": len(source) + len(("import torch", "import agentrl", "agentrl.train(config, loss=sapo)")),
    }
    with tempfile.TemporaryDirectory() as place:
        model = write_model(Path(place) / "model")
        write_tokenizer(model)
        torch.set_num_threads(1)
        report.figures["splitting_error"] = splitting_error(model, Path(place))
        ray = None if quick else float(asyncio.run(under_ray(model, Path(place))))
        report.figures["user_loss_under_ray"] = ray
    report.print()


if __name__ == "__main__":
    main()
