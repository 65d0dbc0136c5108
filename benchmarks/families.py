"""Which architectures are trained, sampled and published as transformers computes them.

    python -m benchmarks.families [--quick] [--output docs/families.json]

Small random models of the true architecture (`tests/model_families.py`), their weights scaled until the mean entropy of
the next token is at most half of log V. Rows shorter and longer than windows, chunks and original positions. `--output`
writes what was seen of each model; `make docs-config` makes the table of docs/results/models.md of it.

`families`: architectures whose log-probabilities are those of the plain forward pass of transformers for each row
alone, packed, with shared prefixes, split over micro-batches, and padded. `families_wrong`: others that are trained.
`families_refused`: those that are refused by name before anything is sampled.
`max_dlogp`: largest difference of a token's log-probability, in nats. `max_gradient_error`: largest difference of the
gradient of their sum, over its norm. `planted_errors_found`: share of the errors planted in the trainer's forward pass
(a neighbor's hidden state leaks, positions + 1, positions × 1.1) that the check at start does not let pass.

`python -m benchmarks.oracle --part families` measures hybrid models and checkpoints for images and text alone:
`family_shapes`; `engine_max_dlogp`, the embedded engine's error in a forked conversation, and in a turn that continues
under a published version; `published_whole`, the share of checkpoints whose version has the names and shapes of their
tensors and is loaded as the released class with no missing keys.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import importlib.util
import json
import re
import tempfile
import warnings
from collections.abc import Collection
from dataclasses import asdict, dataclass
from importlib.metadata import packages_distributions, version
from pathlib import Path

import numpy as np
import torch

from agentrl.config.policies import LoraConfig, PolicyConfig
from agentrl.core.errors import AgentRLError
from agentrl.core.records import PolicyVersion
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.learn.models import PolicyModel, load_models
from agentrl.learn.publish import Publisher
from benchmarks.report import Report, conditions
from tests.contract.engine_kinds import StepClock, prompt, request, token_logprobs, update_after
from tests.model_families import (
    FAMILIES,
    MAX_CONTEXT,
    RECURRENT,
    WINDOW,
    WRAPPED,
    family_config,
    family_rows,
    gradient_error,
    long_run,
    lost_in_publishing,
    plain_logprobs,
    plain_model,
    trained_logprobs,
    ways,
    write_family,
)
from tests.planted_errors import PlantedErrors, missed

FIGURES = (
    *("families", "families_wrong", "families_refused", "max_dlogp", "max_gradient_error"),
    "planted_errors_found",
)
TOLERANCE = 1e-4
"""In nats, of a log-probability in float32."""
QUICK = ("Qwen3", "Llama 4", "Gemma 2", "Phi-3, LongRoPE", "gpt-oss", "Mamba 2", "Gemma 3, with images")
QUICK_SHAPES = ("Qwen3.5", "Gemma 3, with images")
"""Families whose cost with shared prefixes is measured, with `--output` alone."""
START = {"policy": PolicyVersion("policy", 0, 0)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What was seen of one architecture."""

    released_class: str
    shape: str
    """Digest of the configuration."""
    refused: str = ""
    ways: tuple[str, ...] = ()
    difference: float = 0.0
    gradient: float = 0.0
    planted: int = 0
    missed: int = 0
    adapters: str = ""
    """The layers that default adapters are on; "all" linear ones; "none" if only all weights can be trained."""
    embedded: str = ""
    """The longest context of the embedded engine, `context` or `window`; otherwise its refusal."""
    lost: tuple[str, ...] = ()
    """What a published version lacks of the checkpoint."""


def measure(names: Collection[str], output: Path | None = None) -> dict[str, float | None]:
    """Measure these architectures."""
    warnings.filterwarnings("ignore")
    seen = {}
    for name in names:
        seen[name] = each = see(name)
        print(f"{name}: {each.refused or f'{each.difference:.1e} nats, gradient {each.gradient:.1e}'}", flush=True)
    trained = {name: each for name, each in seen.items() if not each.refused}
    planted = sum(each.planted for each in trained.values())
    wrong = sum(not each.difference <= TOLERANCE for each in trained.values())
    if output is not None:
        versions = {package: version(package) for package in ("transformers", "torch")}
        line = {
            "conditions": {key: value for key, value in conditions().items() if key != "commit"} | versions,
            "families": {name: asdict(each) for name, each in seen.items()},
            "vllm": vllm_classes({each.released_class for each in seen.values()}),
        }
        output.write_text(json.dumps(line, indent=1) + "\n", encoding="utf-8")
    return {
        "families": len(trained) - wrong,
        "families_wrong": wrong,
        "families_refused": len(seen) - len(trained),
        "max_dlogp": max(each.difference for each in trained.values()),
        "max_gradient_error": max(each.gradient for each in trained.values()),
        "planted_errors_found": 1 - sum(each.missed for each in trained.values()) / planted,
    }


def see(name: str) -> Seen:
    """Train, sample and publish a small model of an architecture."""
    with tempfile.TemporaryDirectory() as directory:
        path, rows = write_family(name, Path(directory) / "model"), family_rows()
        known = {
            "released_class": json.loads((path / "config.json").read_text())["architectures"][0],
            "shape": shape_digest(name),
        }
        try:
            policy = _loaded(path, PolicyConfig())
        except AgentRLError as error:
            return Seen(**known, refused=_without(path, error))
        expected = np.concatenate(plain_logprobs(path, rows))
        differences = [
            np.abs(np.concatenate(trained_logprobs(policy, rows, way=way)) - expected).max() for way in ways(policy)
        ]
        return Seen(
            **known,
            ways=ways(policy),
            difference=float(np.max(differences)),
            gradient=gradient_error(path, policy, rows),
            planted=len(PlantedErrors(policy.model).possible()),
            missed=len(missed(policy.model, MAX_CONTEXT)),
            adapters=_adapters(path),
            embedded=_embedded(path),
            lost=tuple(lost_in_publishing(path, _published(policy, path.with_name("run")))),
        )


def shape_digest(name: str) -> str:
    """Return what tells apart two configurations of a family."""
    config = family_config(name).to_dict()
    config.pop("transformers_version", None)
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:12]


def vllm_classes(released: Collection[str]) -> dict[str, object]:
    """Return which of these classes the installed vLLM registers, with its version; read, not imported."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return {}
    source = Path(spec.submodule_search_locations[0], "model_executor/models/registry.py").read_text(encoding="utf-8")
    registered = source[: source.index("_PREVIOUSLY_SUPPORTED_MODELS")]
    native = registered[: registered.index("_TRANSFORMERS_SUPPORTED_MODELS")]
    names = set(re.findall(r'^    "(\w+)":', native, re.MULTILINE))
    distributions = packages_distributions()["vllm"]
    return {
        "package": distributions[0],
        "version": version(distributions[0]),
        "classes": sorted(names.intersection(released)),
    }


def engine_error(path: Path, policy: PolicyModel) -> float:
    """Return the embedded engine's largest error of a log-probability: in two conversations that begin together, in one
    that continues a reply of theirs, and in a turn under whose tokens a version arrives."""
    contexts, reply = WINDOW if _embedded(path) == "window" else MAX_CONTEXT, 6
    context = prompt(contexts // 2 - reply)
    with torch.no_grad():
        for parameter in policy.parameters.values():
            parameter.add_(0.01)
    directory = path.with_name("run")
    directory.mkdir()
    weights = Publisher(directory).publish(PolicyVersion("policy", 0, 1), policy)
    before, after = plain_model(path).eval(), plain_model(Path(weights.path)).eval()

    async def converse() -> float:
        engine = EmbeddedEngine.load(str(path), versions=START, slots=4, max_context=contexts, clock=StepClock())
        sessions = [engine.open(f"s{number}", "policy") for number in range(4)]
        group = await asyncio.gather(
            *(each.generate(request(f"r{n}", context, seed=n, max_tokens=reply)) for n, each in enumerate(sessions[:2]))
        )
        longer = np.concatenate([context, group[0].token_ids, prompt(2, 1)])
        branch = await sessions[2].generate(request("branch", longer, max_tokens=reply))
        running = asyncio.ensure_future(sessions[3].generate(request("update", context, max_tokens=reply)))
        await update_after(engine, reply // 2, weights)
        updated = await running
        await engine.close()
        boundary = updated.spans[1].start
        errors = [np.abs(each.logprobs - token_logprobs(before, context, each)) for each in group]
        errors.append(np.abs(branch.logprobs - token_logprobs(before, longer, branch)))
        for model, part in ((before, slice(0, boundary)), (after, slice(boundary, None))):
            errors.append(np.abs(updated.logprobs - token_logprobs(model, context, updated))[part])
        return float(max(error.max() for error in errors))

    return asyncio.run(converse())


def measure_hybrid_and_wrapped(quick: bool) -> dict[str, float | None]:
    """Measure the part `families` of `benchmarks.oracle`."""
    warnings.filterwarnings("ignore")
    worst = dict.fromkeys(("family_max_dlogp", "family_max_gradient_error", "engine_max_dlogp"), 0.0)
    whole, shapes = [], 0
    for name in QUICK_SHAPES if quick else (*RECURRENT, *WRAPPED):
        seen = see(name)
        if seen.refused:
            print(f"{name} is refused: {seen.refused}", flush=True)
            continue
        with tempfile.TemporaryDirectory() as directory:
            path = write_family(name, Path(directory) / "model")
            policy = _loaded(path, PolicyConfig())
            engine = engine_error(path, policy)
        shapes += 1
        whole.append(not seen.lost)
        errors = (seen.difference, seen.gradient, engine)
        worst = {key: max(value, error) for (key, value), error in zip(worst.items(), errors, strict=True)}
        print(f"{name}: {errors[0]:.1e} nats, gradient {errors[1]:.1e}, engine {errors[2]:.1e} nats", flush=True)
    return {
        "family_shapes": shapes,
        **worst,
        "published_whole": sum(whole) / len(whole),
    }


def _published(policy: PolicyModel, directory: Path) -> Path:
    directory.mkdir()
    return Path(Publisher(directory).publish(PolicyVersion("policy", 0, 1), policy).path)


def _loaded(path: Path, policy: PolicyConfig) -> PolicyModel:
    return load_models(long_run(path, policies={"policy": policy}).trainer_plan, torch.device("cpu"))["policy"]


def _embedded(path: Path) -> str:
    """The longest context that the embedded engine serves, or why it serves none."""
    error: AgentRLError | None = None
    for length, name in ((MAX_CONTEXT, "context"), (WINDOW, "window")):
        try:
            EmbeddedEngine.load(str(path), versions=START, slots=2, max_context=length)
        except AgentRLError as refusal:
            error = error or refusal
        else:
            return name
    return _without(path, error)


def _without(path: Path, error: object) -> str:
    return str(error).replace(str(path), "DIR")


def _adapters(path: Path) -> str:
    """The layers that default adapters are on."""
    try:
        described = _loaded(path, PolicyConfig(lora=LoraConfig(rank=2))).described
    except AgentRLError:
        return "none"
    if "; not on " not in described:
        return "all"
    return re.findall(r" on (.+?), [\d.]+% of", described)[0]


def main() -> None:
    """Measure, and print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few architectures")
    parser.add_argument("--output", type=Path, help="also write what was seen here; for docs/results/models.md")
    options = parser.parse_args()
    if options.quick and options.output:
        raise SystemExit("--output needs a whole run: leave out --quick")
    report = Report("families", quick=options.quick, repeats=1, compared_with="transformers, each row alone")
    report.figures = dict.fromkeys(FIGURES)
    report.figures |= measure(QUICK if options.quick else (*FAMILIES, *WRAPPED), options.output)
    report.print()


if __name__ == "__main__":
    main()
