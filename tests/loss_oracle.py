"""Losses and advantages against the recorded values and gradients of other libraries."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agentrl.config.sections import LossConfig, TrainerConfig
from agentrl.credit.estimators import REWARD_ESTIMATORS
from agentrl.learn.loss_batch import LossBatch
from agentrl.learn.losses import kl_divergence, make_loss
from agentrl.learn.step_columns import IDS, TokenColumns
from tests.loss_cases import token_table

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
    """The numbers of other packages: `trl`, or `others`, which `tests/record_losses.py` writes."""
    path = Path(__file__).with_name(f"losses_of_{package}.json")
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
    return found


def _compared(
    label: str, ours: dict[str, Any], case: dict[str, Any], rows: list[dict[str, Any]], longest: int
) -> dict[str, float]:
    """The errors of our loss in a recorded case."""
    lengths = np.array([len(row["logprobs"]) for row in rows])
    weights = _weights(ours.get("weights", "tokens"), lengths, longest)
    if ours["name"] == "divergence":
        logprobs = torch.tensor(np.concatenate([row["logprobs"] for row in rows]), requires_grad=True)
        reference = torch.tensor(np.concatenate([row["reference"] for row in rows]))
        away = kl_divergence(logprobs, reference) * torch.tensor(weights)
        [gradient] = torch.autograd.grad(away.sum(), logprobs)
        return _errors(label, away.detach(), gradient, case)
    loss = {name: ours[name] for name in ("name", "kl") if name in ours} | ours.get("options", {})
    errors = compared(label, loss, case, rows, weights, lags=ours.get("lags", 0))
    if "gradient_only" in ours:
        del errors[f"{label}, value"]
    return errors


def compared(
    label: str,
    loss: dict[str, Any],
    theirs: dict[str, Any],
    rows: list[dict[str, Any]],
    weights: np.ndarray[Any, Any],
    *,
    lags: int = 0,
) -> dict[str, float]:
    """The errors of our loss of a step and its gradient.

    Args:
        label: names the case.
        loss: `trainer.loss`.
        theirs: what another library returns: `loss` and `gradient`.
        rows: of the step.
        weights: factor on each token's loss, from the normalizer.
        lags: of all tokens.
    """
    lengths = np.array([len(row["logprobs"]) for row in rows])
    number = np.repeat(np.arange(len(rows)), lengths)
    columns = TokenColumns(
        tokens=token_table(
            np.concatenate([row["behavior"] for row in rows]), np.repeat([row["advantage"] for row in rows], lengths)
        ),
        lags=np.full(len(number), lags, np.int32),
        names={"seat": ["agent"], "group": ["g0"]},
        starts=np.concatenate([[0], np.cumsum(lengths)]),
        **dict.fromkeys(IDS, number),
    )
    batch = LossBatch(
        columns,
        logprobs=torch.tensor(np.concatenate([row["logprobs"] for row in rows]), requires_grad=True),
        entropies=torch.zeros(len(number), dtype=torch.float64, requires_grad=True),
        reference_logprobs=torch.tensor(np.concatenate([row["reference"] for row in rows])),
    )
    config = TrainerConfig(loss=LossConfig.model_validate(loss))
    found = make_loss(config).evaluate(batch, torch.tensor(weights))
    return _errors(label, found.loss, found.by_logprob, theirs)


def _errors(label: str, loss: torch.Tensor, gradient: torch.Tensor, theirs: dict[str, Any]) -> dict[str, float]:
    """The errors of loss and gradient."""
    expected = theirs["gradient"]
    flat = np.concatenate(expected) if isinstance(expected[0], list) else expected
    return {
        f"{label}, gradient": _error(gradient.tolist(), flat),
        f"{label}, value": _error([float(loss.sum())], [theirs["loss"]]),
    }


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
