"""The part `exchange` of `benchmarks.parallel`: what ranks compute together over gloo, against one rank.

The cases are those of tests/unit/test_learn_experts.py and test_learn_context.py; a quick run leaves out four ranks.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from agentrl.learn.experts import predict_layer_bytes
from tests.learn_cases import write_model
from tests.sharding_cases import Compared, compared, dispatched, made
from tests.unit import test_learn_context, test_learn_experts

LONG: dict[str, Any] = {"rows": {"prefix": 200, "longest": 200}, "micro_batch_tokens": 1 << 14, "measured": True}
"""A step of one micro-batch, over rows of up to 400 tokens."""
RANKS = 2
"""Number of ranks whose costs are measured."""
LAYERS, WIDTH, HEADS, KEY_HEADS, HEAD_SIZE, EXPERTS, TOP_K, ITEMSIZE = 2, 32, 4, 4, 8, 4, 2, 4
"""The shapes of `write_model`; an expert has three matrices of the squared width."""


def figures(quick: bool) -> dict[str, float | None]:
    """Measure all figures of the part."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        experts, context = place / "models", place / "models/context"
        test_learn_experts.write_models(experts)
        test_learn_context.write_models(context)
        write_model(experts / "many", kind="moe", num_experts=2048)
        expert_errors = _errors(
            partial(test_learn_experts.cases, exhaustive=True), experts, place / "experts", quick=quick
        )
        context_errors = _errors(partial(test_learn_context.cases, context), context, place / "tokens", quick=quick)
        return {
            **dict(zip(("ep_gradient_error", "ep_control"), expert_errors, strict=True)),
            **dict(zip(("cp_gradient_error", "cp_control"), context_errors, strict=True)),
            "expert_lora_error": max(
                test_learn_experts.expert_lora_error(experts / kind, place / "adapters" / kind)
                for kind in test_learn_experts.FAMILIES
            ),
            **_costs(experts, place / "costs"),
        }


def _errors(
    cases: Callable[[int], Mapping[str, Mapping[str, Any]]], models: Path, place: Path, *, quick: bool
) -> tuple[float, float]:
    """Return the largest error of the cases, and the smallest of those with a planted fault."""
    errors, controls = [], []
    for ranks in (2,) if quick else (2, 4):
        every = cases(ranks)
        for name, each in compared(models, place / str(ranks), ranks, every).items():
            print(f"  {ranks} ranks, {name}: {each.error:.2g}", flush=True)
            (controls if "fault" in every[name]["settings"] else errors).append(each.error)
    return max(errors), min(controls)


def _costs(models: Path, place: Path) -> dict[str, float]:
    cases = {
        "tokens": made("context/qwen3", **test_learn_context.PLAIN, **LONG),
        "gathered": made("moe", experts="gathered", routed=True, **LONG),
        "dispatched": dispatched("moe", routed=True, **LONG),
    }
    found = compared(models, place, RANKS, cases)
    # In processes of their own, which hold no memory of a case before.
    many = {
        name: compared(models, place / name, RANKS, {"many": made("many", experts=name, measured=True)})["many"]
        for name in ("gathered", "dispatched")
    }
    num_tokens = sum(found["tokens"].one["tokens"])
    share = (RANKS - 1) / RANKS
    predicted = predict_layer_bytes(
        weights=EXPERTS * 3 * WIDTH**2,
        width=WIDTH,
        top_k=TOP_K,
        tokens=sum(sum(rank["tokens"]) for rank in found["dispatched"].several),
        ranks=RANKS,
        itemsize=ITEMSIZE,
        trained=True,
    )
    pairs = {
        "tokens": (
            _total(found["tokens"], "rows"),
            LAYERS * 4 * (HEADS + KEY_HEADS) * HEAD_SIZE * num_tokens * ITEMSIZE * share,
        ),
        "dispatched": (_total(found["dispatched"], "rows"), LAYERS * predicted.dispatched),
        "gathered": (
            _total(found["gathered"], "weights") - _total(found["dispatched"], "weights"),
            LAYERS * RANKS * predicted.gathered,
        ),
    }
    for name, (sent, formula) in pairs.items():
        print(f"  {name}: {sent:,} bytes sent, {formula:,.0f} by the formula", flush=True)
    return {
        "collective_bytes": max(abs(sent / formula - 1) for sent, formula in pairs.values()),
        "experts_held": found["dispatched"].several[0]["experts"],
        "context_peak": _largest(found["tokens"], "peak") / found["tokens"].one["costs"]["peak"],
        "experts_peak": _largest(many["dispatched"], "grown") / _largest(many["gathered"], "grown"),
    }


def _total(found: Compared, name: str) -> int:
    return sum(rank["costs"][name] for rank in found.several)


def _largest(found: Compared, name: str) -> int:
    return max(rank["costs"][name] for rank in found.several)
