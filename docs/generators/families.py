"""Generates docs/results/models.md from docs/families.json: `python -m docs.generators.families >
docs/results/models.md`. No figure of it is typed by hand."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from docs.generators.peers import markdown
from tests.model_families import FAMILIES, SERVED_BY_VLLM, WRAPPED

SEEN = Path(__file__).resolve().parents[1] / "families.json"
SHORT_NAMES = {
    "`q_proj`, `k_proj`, `v_proj`, `o_proj`": "attention",
    "`gate_proj`, `up_proj`, `down_proj`": "MLP",
    "`q_a_proj`, `q_b_proj`, `kv_a_proj_with_mqa`, `kv_b_proj`, `o_proj`": "MLA",
}
"""Of the layers that an adapter is on; the page explains them."""
HEADINGS = ("classes, with their models", "rows", "adapter", "embedded engine", "vLLM")
EMBEDDED = {"context": "yes", "window": "window"}


def families_page(seen: Mapping[str, Any]) -> str:
    """Render the page from what `benchmarks.families` wrote."""
    on, vllm, families = seen["conditions"], seen["vllm"], seen["families"]
    refusals = {
        name: each["refused"] or each["embedded"]
        for name, each in families.items()
        if each["refused"] or each["embedded"] not in EMBEDDED
    }
    alike: dict[tuple[str, ...], dict[str, list[str]]] = {}
    for name in (*FAMILIES, *WRAPPED):
        if name in families:
            shown, released, *cells = _row(name, families[name], set(vllm["classes"]))
            alike.setdefault(tuple(cells), {}).setdefault(released, []).append(shown)
    rows = [
        (", ".join(f"{released} ({'; '.join(models)})" for released, models in classes.items()), *cells)
        for cells, classes in alike.items()
    ]
    trained = [each for each in families.values() if not each["refused"]]
    text = f"""\
# Model families, measured

<!-- Written by `make docs-config` from docs/families.json, which `python -m benchmarks.families --output
docs/families.json` measures on the models of tests/model_families.py; changes belong there. -->

How closely agentrl reproduces transformers: small random models of the true architecture, in float32, their next tokens
sharpened. Measured on {on["date"]}, on {on["machine"]}, with transformers {on["transformers"]}, torch {on["torch"]} and
{vllm["package"]} {vllm["version"]}. Log-probabilities differ from the plain forward pass of their row by at most
{_short(max(each["difference"] for each in trained))}, gradients by at most
{_short(max(each["gradient"] for each in trained))} of their norm.

* **rows**: whether the trainer computes a prefix shared by several rows once, or pads whole rows.
* **adapter**: its layers by default: "all" linear layers; "attention" `q_proj`, `k_proj`, `v_proj`, `o_proj`; "MLP"
  `gate_proj`, `up_proj`, `down_proj`; "MLA" `q_a_proj`, `q_b_proj`, `kv_a_proj_with_mqa`, `kv_b_proj`, `o_proj`; with
  "none", only all weights can be trained.
* **embedded engine**: "window" means contexts of at most the model's sliding window or chunk.
* **vLLM**: "tested" means that a test serves a small model of the class, "registered" that vLLM has the class.

{markdown(HEADINGS, rows)}
"""
    return (
        text
        + "## Refused\n\n"
        + "".join(f"* {name}: {refusal.removeprefix('DIR: ')}\n" for name, refusal in refusals.items())
    )


def _row(name: str, each: Mapping[str, Any], registered: set[str]) -> tuple[str, ...]:
    released = each["released_class"]
    vllm = "tested" if name in SERVED_BY_VLLM else "registered" if released in registered else "–"
    if each["refused"]:
        return name, f"`{released}`", "refused", "–", "–", vllm
    lost = ", ".join(f"`{part}`" for part in each["lost"])
    return (
        f"{name} (without {lost})" if lost else name,
        f"`{released}`",
        "shared" if "shared" in each["ways"] else "padded",
        _layers(each["adapters"]),
        EMBEDDED.get(each["embedded"], "refused"),
        vllm,
    )


def _layers(names: str) -> str:
    if names in ("all", "none"):
        return names
    layers = f"`{names.replace(', ', '`, `')}`"
    for long, short in SHORT_NAMES.items():
        layers = layers.replace(long, short)
    return layers


def _short(value: float) -> str:
    return f"{value:.0e}".replace("e-0", "e-")


if __name__ == "__main__":
    sys.stdout.write(families_page(json.loads(SEEN.read_text(encoding="utf-8"))))
