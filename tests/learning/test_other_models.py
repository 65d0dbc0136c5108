"""Any local causal LM takes the shipped model's place: Qwen3, Qwen3-MoE and Llama with random weights."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import transformers

import agentrl
from agentrl.config.load import load
from agentrl.journal.entries import TurnEntry
from agentrl.journal.reader import TurnLogReader

pytestmark = [pytest.mark.learning, pytest.mark.slow, pytest.mark.timeout(300)]

LLAMA_TEMPLATE = """\
{%- if tools %}<|im_start|>system
Answer with JSON {"name": …, "parameters": …} to call one of:
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{%- endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{%- if message.tool_calls %}
{"name": "{{ message.tool_calls[0].function.name }}", "parameters": \
{{ message.tool_calls[0].function.arguments | tojson }}}<|im_end|>
{%- else %}
{{ message.content | trim }}<|im_end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def random_model(kind: str, shipped: Path, directory: Path) -> Path:
    """A model of two layers with the shipped tokenizer; Llama has a template and a tool-call format of its own."""
    shape = {
        "vocab_size": json.loads((shipped / "config.json").read_text())["vocab_size"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
    }
    torch.manual_seed(0)
    if kind == "qwen3_moe":
        shape |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**shape))
    elif kind == "qwen3":
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape))
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    model.save_pretrained(directory)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(shipped / file, directory / file)
    if kind == "llama":
        (directory / "chat_template.jinja").write_text(LLAMA_TEMPLATE)
    return directory


class Patient(agentrl.ToolEnvironment):
    """Rewards short answers, so that a random model sees some variance."""

    @agentrl.tool
    def calculate(self, a: int, op: str, b: int) -> int:
        """One operation."""
        return a + b

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return float(len(episode.turns[-1].text) % 2)

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        return [agentrl.Task(id=f"{split}-{n}", data={"question": f"{n} + {n} ="}) for n in range(12)]


@pytest.mark.parametrize(
    ("kind", "adapter"),
    [
        pytest.param("qwen3", True, id="qwen3-lora"),
        pytest.param("qwen3_moe", False, id="qwen3_moe-full"),
        *(
            pytest.param(kind, adapter, id=f"{kind}-{'lora' if adapter else 'full'}", marks=pytest.mark.exhaustive)
            for kind, adapter in (("qwen3", False), ("qwen3_moe", True), ("llama", False), ("llama", True))
        ),
    ],
)
def test_a_random_model_is_trained_with_its_own_template(
    repository: Path, tmp_path: Path, kind: str, adapter: bool
) -> None:
    model = random_model(kind, repository / "environments/calculator/model", tmp_path / kind)
    overrides = [
        f"--directory={tmp_path}",
        "--name=other",
        f"--model.path={model}",
        "--steps=2",
        "--policies.solver.step_size=16",
        "--evaluation.tasks=4",
        "--evaluation.every=1",
        "--sampling.max_tokens=12",
        "--engine.max_context=512",
    ]
    if adapter:
        targets = '["q_proj","v_proj"]'
        overrides += ["--policies.solver.lora.rank=4", f"--policies.solver.lora.target_modules={targets}"]
    run = agentrl.train(load(repository / "examples/01_tool_use.toml", overrides), environment=Patient, quiet=True)
    assert len(run.metrics) == 2
    assert all(math.isfinite(step["loss"]) for step in run.metrics)
    assert run.metrics[0]["k3"] < 1e-6, "engine and trainer disagree about the same weights"
    assert [entry["step"] for entry in run.summary["evaluations"]] == [0, 1, 2]
    entries = TurnLogReader(run.path / "journal").read("turns-0.db", "e0", 0)
    first = next(body for body in (entry.decode() for entry in entries) if isinstance(body, TurnEntry))
    assert first.messages[0]["role"] == "user"
    assert len(first.tokens.token_ids) > 0


def test_a_mixture_of_experts_is_trained_through_the_experts_that_were_recorded(
    repository: Path, tmp_path: Path
) -> None:
    model = random_model("qwen3_moe", repository / "environments/calculator/model", tmp_path / "moe")
    overrides = [
        f"--directory={tmp_path}",
        f"--model.path={model}",
        "--steps=4",
        "--policies.solver.step_size=16",
        "--policies.solver.learning_rate=0.003",
        "--evaluation.tasks=0",
        "--sampling.max_tokens=12",
        "--engine.capture_routing=true",
    ]
    run = agentrl.train(load(repository / "examples/01_tool_use.toml", overrides), environment=Patient, quiet=True)
    assert [step["unrouted_share"] for step in run.metrics] == [0.0] * 4
    assert run.metrics[0]["mismatch/k3"] < 1e-6
    assert run.metrics[0]["mismatch/max_difference"] < 1e-3
    assert run.metrics[0]["mismatch/tokens"] == run.metrics[0]["lag_tokens/0"] > 0
    assert sum(step.get("lag_tokens/1", 0) for step in run.metrics) > 0


def test_sampling_filters_are_trained_with_their_kept_sets(repository: Path, tmp_path: Path) -> None:
    overrides = [
        f"--directory={tmp_path}",
        "--steps=2",
        "--policies.solver.max_staleness=0",
        "--policies.solver.step_size=32",
        "--evaluation.tasks=0",
        "--sampling.top_k=8",
        "--sampling.top_p=0.95",
        "--sampling.temperature=1.3",
    ]
    run = agentrl.train(load(repository / "examples/01_tool_use.toml", overrides), quiet=True)
    assert max(step["abs_logprob_difference"] for step in run.metrics) < 1e-4
    assert all(0.5 < step["kept_mass"] < 1.0 for step in run.metrics)
