"""examples/10_gpu.toml and the set-ups of docs/tutorials/gpu.md and docs/how-to/several_gpus.md, on the machines they
describe: doctor accepts and explains each."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from transformers import Qwen3Config

from agentrl.cli.main import main
from agentrl.config.fields import shipped_example
from agentrl.config.load import load
from agentrl.core.machine import Gpu, Memory

SHAPES = {
    "Qwen3-0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "Qwen3-8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
    "Qwen3-32B": {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64},
}
MACHINES = {"Qwen3-0.6B": (1, 24), "Qwen3-8B": (8, 80), "Qwen3-32B": (8, 80)}
"""GPUs, and GB of each."""


def set_up(repository: Path, file: str, model: str) -> str:
    """The configuration of a model in an example or on a page."""
    text = (repository / file).read_text()
    texts = re.findall(r"```toml\n(.*?)```", text, flags=re.DOTALL) if file.endswith(".md") else [text]
    (found,) = (text for text in texts if f'/{model}"' in text)
    return found.replace("env.py:WordGame", "calculator")


def write_tokenizer(directory: Path, *, tokens: int) -> None:
    """Write the tokenizer of the shipped model, with as many tokens as a model of another size has."""
    shipped = Path(load(shipped_example("01_tool_use")).model.path)
    for file in (*shipped.glob("*token*"), *shipped.glob("chat_template*")):
        shutil.copy(file, directory)
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    held = len(tokenizer["model"]["vocab"]) + len(tokenizer["added_tokens"])
    tokenizer["model"]["vocab"] |= {f"token {number}": number for number in range(held, tokens)}
    path.write_text(json.dumps(tokenizer))


@pytest.mark.slow
@pytest.mark.timeout(1800)  # an expiry inside `main` would be reported by it, as an internal error
@pytest.mark.parametrize(
    ("source", "model"),
    [
        ("examples/10_gpu.toml", "Qwen3-0.6B"),
        ("docs/tutorials/gpu.md", "Qwen3-0.6B"),
        pytest.param("docs/how-to/several_gpus.md", "Qwen3-8B", marks=pytest.mark.exhaustive),
        pytest.param("docs/how-to/several_gpus.md", "Qwen3-32B", marks=pytest.mark.exhaustive),
    ],
)
def test_doctor_accepts_and_explains_a_set_up(
    repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    source: str,
    model: str,
) -> None:
    more = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960}
    config = Qwen3Config(**SHAPES[model], **more, tie_word_embeddings=model == "Qwen3-0.6B", dtype="bfloat16")
    config.save_pretrained(tmp_path / model)
    write_tokenizer(tmp_path / model, tokens=config.vocab_size)
    file = tmp_path / "run.toml"
    text = set_up(repository, source, model)
    file.write_text(re.sub(rf"(Qwen|(\.\./)?models)/{model}\"", f'{tmp_path / model}"', text))
    count, size = MACHINES[model]
    card = Memory(size * 10**9, size * 10**9)
    monkeypatch.setattr("agentrl.core.machine.gpus", lambda: tuple(Gpu(str(at), "card", card) for at in range(count)))
    code = main(["doctor", str(file), "--json"])
    printed = capsys.readouterr()
    assert printed.out, printed.err
    sections = json.loads(printed.out)["sections"]
    checks = [check for title in ("memory", f"{file} will use") for check in sections[title]]
    assert not [check for check in checks if check["level"] == "missing"], checks
    assert code == 0
    lines = [check["result"] for check in checks if check["name"] == "devices"]
    assert len(lines) == count
    assert not any("not used" in line for line in lines)


def test_doctor_names_all_that_the_gpu_example_lacks_here(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("agentrl.core.machine.gpus", lambda: ())
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    example = repository / "examples/10_gpu.toml"
    absent = tmp_path / "Qwen3-0.6B"
    assert main(["doctor", str(example), f"--model.path={absent}", "--json"]) == 1
    sections = json.loads(capsys.readouterr().out)["sections"]
    checks = [*sections[f"{example} will use"], *sections["memory"]]
    missing = {check["name"]: check["result"] for check in checks if check["level"] == "missing"}
    assert missing.keys() == {"engine", "model"}
    assert "Missing here: a GPU " in missing["engine"]
    assert f"{absent}: there is no such directory" in missing["model"]
    assert "hf download" in missing["model"]
