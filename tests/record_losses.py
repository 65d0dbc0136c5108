"""Record what the losses and advantages of other libraries return, for `tests/loss_oracle.py` to compare with.

    python -m tests.record_losses VERL AREAL PRIME_RL > tests/losses_of_others.json

The arguments are git directories. The functions run as their repositories define them at HEAD, cut out of their files
with stand-ins for the configuration they read, in float64 over the ragged rows of `losses_of_trl.json`; nothing of
theirs is kept but the numbers, with the commit. Each case names our loss, its options and the divisor that theirs uses.
"""

from __future__ import annotations
import __future__

import ast
import functools
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

OPTIONS = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
SEQUENCE = {"clip_low": 0.05, "clip_high": 0.1}


class Settings(dict[str, Any]):
    """Stands for a configuration: entries are attributes too."""

    __getattr__ = dict.__getitem__


def functions(repository: str, path: str, scope: Mapping[str, Any]) -> SimpleNamespace:
    """The functions and classes of a file that run with nothing else than `scope`, and the commit."""
    text = subprocess.run(["git", "-C", repository, "show", f"HEAD:{path}"], capture_output=True, text=True, check=True)
    wanted = [node for node in ast.parse(text.stdout).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    namespace: dict[str, Any] = dict(scope)
    for node in wanted:
        if isinstance(node, ast.FunctionDef):
            node.decorator_list = []
        module = ast.Module(body=[node], type_ignores=[])
        try:
            exec(compile(module, path, "exec", flags=__future__.annotations.compiler_flag), namespace)
        except NameError:
            continue  # it needs more than the scope, and no case needs it
    return SimpleNamespace(**namespace)


def commit(repository: str) -> str:
    """The commit that a repository is at."""
    return subprocess.check_output(["git", "-C", repository, "rev-parse", "HEAD"], text=True).strip()


class Batch:
    """The recorded rows, padded as [rows, longest], and as one line of tokens."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.lengths = [len(row["logprobs"]) for row in rows]
        self.mask = torch.zeros(len(rows), max(self.lengths), dtype=torch.bool)
        for at, length in enumerate(self.lengths):
            self.mask[at, :length] = True

        def padded(values: list[Any]) -> Tensor:
            found = torch.zeros(self.mask.shape, dtype=torch.float64)
            found[self.mask] = torch.tensor(np.concatenate(values))
            return found

        self.logprobs = padded([row["logprobs"] for row in rows]).requires_grad_()
        self.behavior = padded([row["behavior"] for row in rows])
        self.reference = padded([row["reference"] for row in rows])
        self.advantages = padded([[row["advantage"]] * length for row, length in zip(rows, self.lengths, strict=True)])
        self.proximal = self.behavior + (self.logprobs.detach() - self.behavior) / 2  # as of lag 2, interpolated

    def answer(self, function: Callable[[Batch], Tensor]) -> dict[str, Any]:
        """The value of a loss and its derivative by each log-probability."""
        loss = function(self)
        (gradient,) = torch.autograd.grad(loss, self.logprobs)
        return {"loss": float(loss.detach()), "gradient": gradient[self.mask].tolist()}


def verl_cases(repository: str) -> Iterator[tuple[str, dict[str, Any], Callable[[Batch], Tensor]]]:
    """The cases of verl."""
    tools = functions(repository, "verl/utils/torch_functional.py", {"torch": torch})

    class ActorConfig(Settings):
        """Stands for verl's."""

    class AlgoConfig(Settings):
        """Stands for verl's."""

    scope = {"torch": torch, "verl_F": tools, "ActorConfig": ActorConfig, "AlgoConfig": AlgoConfig, "np": np}
    core = functions(repository, "verl/trainer/ppo/core_algos.py", scope)

    def config(**changes: Any) -> ActorConfig:
        values = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0}
        values |= {"tau_pos": 1.0, "tau_neg": 1.05, "global_batch_info": {}}
        return ActorConfig({**values, "policy_loss": Settings(kl_cov_ratio=0.1, ppo_kl_coef=1.0), **changes})

    def loss(name: str, mode: str = "token-mean", **changes: Any) -> Callable[[Batch], Tensor]:
        function = getattr(core, f"compute_policy_loss_{name}")

        def call(b: Batch) -> Tensor:
            found = function(b.behavior, b.logprobs, b.advantages, b.mask.double(), mode, config(**changes))[0]
            return found  # type: ignore[no-any-return]

        return call

    narrow = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1}
    yield "vanilla", {"name": "ppo", "options": OPTIONS}, loss("vanilla")
    mean = {"weights": "sequence_mean"}
    yield (
        "vanilla, seq-mean-token-mean",
        {"name": "ppo", "options": OPTIONS, **mean},
        loss("vanilla", "seq-mean-token-mean"),
    )
    summed = {"weights": "sequences"}
    yield (
        "vanilla, seq-mean-token-sum",
        {"name": "ppo", "options": OPTIONS, **summed},
        loss("vanilla", "seq-mean-token-sum"),
    )
    longest = {"weights": "longest"}
    yield (
        "vanilla, seq-mean-token-sum-norm",
        {"name": "ppo", "options": OPTIONS, **longest},
        loss("vanilla", "seq-mean-token-sum-norm"),
    )
    loose = {**OPTIONS, "dual_clip": 10.0}
    yield "vanilla, clip_ratio_c 10", {"name": "ppo", "options": loose}, loss("vanilla", clip_ratio_c=10.0)
    region = {"name": "truncated", "options": {"max_ratio": 1.5, "trust_region": 0.2}}
    yield "dppo_tv", region, loss("dppo_tv", clip_ratio_high=0.2, clip_ratio_c=1.5)
    yield "gspo", {"name": "gspo", "options": SEQUENCE, **mean}, loss("gspo", "seq-mean-token-mean", **narrow)
    yield "sapo", {"name": "sapo", **mean}, loss("sapo", "seq-mean-token-mean")
    yield "cispo", {"name": "cispo", "options": {"min_ratio": 0.8, "max_ratio": 1.28}}, loss("cispo")
    yield "kl_cov", {"name": "kl_cov", "options": {"share": 0.1}}, loss("kl_cov")

    def divergence(b: Batch) -> Tensor:
        return tools.masked_mean(core.kl_penalty(b.logprobs, b.reference, "k3"), b.mask.double())

    yield "kl_penalty", {"name": "divergence"}, divergence


def areal_cases(repository: str) -> Iterator[tuple[str, dict[str, Any], Callable[[Batch], Tensor]]]:
    """The cases of AReaL."""
    scope = {"torch": torch, "dataclass": dataclass, "functools": functools, "Any": Any}
    kl = functions(repository, "areal/utils/data.py", scope).KLEstimator
    code = functions(repository, "areal/utils/functional/functional.py", {**scope, "KLEstimator": kl})
    actor = functions(repository, "areal/trainer/ppo/actor.py", scope)

    def ppo(b: Batch, mask: Tensor | None = None, proximal: Tensor | None = None, **changes: Any) -> Tensor:
        given = {"eps_clip": 0.2, "eps_clip_higher": 0.28, "c_clip": 3.0, **changes}
        proximal = b.behavior if proximal is None else proximal
        found, _ = code.ppo_actor_loss_fn(
            b.logprobs, proximal, b.behavior, b.advantages, loss_mask=b.mask if mask is None else mask, **given
        )
        return found  # type: ignore[no-any-return]

    def m2po(b: Batch) -> Tensor:
        kept = actor._apply_m2po_masking(b.behavior, b.logprobs.detach(), b.mask, 0.1)
        return ppo(b, mask=kept) * kept.sum() / b.mask.sum()  # ours keeps the number of tokens as it was

    clamp = Settings(level="token", action="clamp", metric="ratio", agg="sum", upper=1.1, lower=0.0)
    yield "ppo", {"name": "ppo", "options": OPTIONS}, ppo
    unclipped = {**OPTIONS, "dual_clip": 1e9}
    yield "ppo without c_clip", {"name": "ppo", "options": unclipped}, functools.partial(ppo, c_clip=None)
    yield (
        "ppo, decoupled, clamped",
        {"name": "decoupled_ppo", "options": {"clip_low": 0.2, "clip_high": 0.28, "max_ratio": 1.1}, "lags": 2},
        lambda b: ppo(b, proximal=b.proximal, c_clip=None, rejection_sampling=clamp),
    )
    yield (
        "ppo, sequence",
        {"name": "gspo", "options": SEQUENCE},
        functools.partial(ppo, importance_sampling_level="sequence", eps_clip=0.05, eps_clip_higher=0.1, c_clip=None),
    )
    yield (
        "sapo",
        {"name": "sapo"},
        lambda b: code.sapo_loss_fn(b.logprobs, b.behavior, b.advantages, 1.0, 1.05, b.mask)[0],
    )
    yield "m2po", {"name": "m2po", "options": {"threshold": 0.1, **OPTIONS}}, m2po


def prime_cases(repository: str) -> Iterator[tuple[str, dict[str, Any], Callable[[Batch], Tensor]]]:
    """The cases of prime-rl."""
    path, scope = (
        "src/prime_rl/trainer/rl/loss.py",
        {"torch": torch, "dataclass": dataclass, "field": lambda default: None},
    )
    code = functions(repository, path, {**scope, "LossOutputs": SimpleNamespace})
    config = SimpleNamespace(dppo_mask_high=0.2, dppo_mask_low=0.2, adv_tau=1.0, kl_tau=0.0)

    def default(b: Batch) -> Tensor:
        inputs = SimpleNamespace(
            trainer_logprobs=b.logprobs[b.mask],
            inference_logprobs=b.behavior[b.mask],
            advantages=b.advantages[b.mask],
            loss_mask=b.mask[b.mask],
            loss_weights=None,
        )
        return code.default_loss_fn(inputs, config).loss / b.mask.sum()  # type: ignore[no-any-return]

    only = "its value is that of w A, ours that of sg(w) A log pi; the derivatives are the same"
    yield "default (DPPO)", {"name": "truncated", "options": {"max_ratio": 1e9}, "gradient_only": only}, default


def advantage_cases(repository: str) -> Iterator[dict[str, Any]]:
    """The advantages of verl, over groups of three and two with rewards of both signs."""
    core = functions(
        repository, "verl/trainer/ppo/core_algos.py", {"torch": torch, "np": np, "defaultdict": defaultdict}
    )
    rewards, groups = [1.0, 0.25, -0.5, 0.75, 0.0], ["a", "a", "a", "b", "b"]
    mask = torch.ones(5, 1, dtype=torch.float64)
    for name, ours, options in (
        ("rloo", "leave_one_out", {}),
        ("grpo", "group_std", {"norm_adv_by_std_in_grpo": True}),
        ("grpo", "group_mean", {"norm_adv_by_std_in_grpo": False}),
    ):
        function = getattr(core, f"compute_{name}_outcome_advantage")
        given = torch.tensor(rewards, dtype=torch.float64)[:, None]
        found, _ = function(given, mask, np.array(groups), **options)
        yield {"case": name, "ours": ours, "rewards": rewards, "groups": groups, "advantages": found[:, 0].tolist()}


def main() -> None:
    """Print the record."""
    verl, areal, prime = sys.argv[1:]
    rows = json.loads(Path(__file__).with_name("losses_of_trl.json").read_text(encoding="utf-8"))["rows"]
    batch, packages = Batch(rows), []
    for package, repository, cases in (
        ("verl", verl, verl_cases),
        ("AReaL", areal, areal_cases),
        ("prime-rl", prime, prime_cases),
    ):
        found = [{"case": case, "ours": ours, **batch.answer(call)} for case, ours, call in cases(repository)]
        advantages = list(advantage_cases(repository)) if package == "verl" else []
        record = {"package": package, "commit": commit(repository), "cases": found, "advantages": advantages}
        packages.append(record)
    sys.stdout.write(json.dumps({"packages": packages}) + "\n")


if __name__ == "__main__":
    main()
