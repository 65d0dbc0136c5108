"""All weights of a run on a cluster: from its trainer to a real vLLM on another host, at every step."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.contract.test_engine_vllm_process import needs_vllm
from tests.e2e.test_cluster import SUMS, command
from tests.journal_oracle import judge
from tests.support.hosts import Hosts, unavailable

pytestmark = [needs_vllm, pytest.mark.ray, pytest.mark.e2e, pytest.mark.vllm, pytest.mark.exhaustive]

STEPS = 6
CLUSTER = f"""
directory = "/tmp/runs"
steps = {STEPS}
workers = 2
cluster.address = "auto"
credit.group_size = 4
evaluation.tasks = 0
"""
SETTINGS = f"""
name = "two"
{CLUSTER}environment.id = "/tmp/sums.py:Sums"
model.path = "agentrl.environments:calculator/model"
policies.solver = {{ learning_rate = 3e-4, step_size = 8 }}
sampling = {{ max_tokens = 32, max_turns = 4 }}
engine = {{ replicas = 1, slots = 16, max_context = 192, publish = "full", vllm = {{}} }}
"""
RECEIVED = "stat -c '%n %s' /dev/shm/agentrl-child-*/versions/*/* /tmp/agentrl-child-*/versions/*/* 2>/dev/null"
"""Prints path and size of what an engine's process keeps of the files of versions."""
CHANGES = f"""
name = "changes"
{CLUSTER}environment.id = "/tmp/parity.py:Parity"
model = {{ path = "/tmp/model", dtype = "bfloat16" }}
policies.solver = {{ learning_rate = 1e-5, step_size = 8 }}
sampling = {{ max_tokens = 12, max_turns = 1 }}
engine = {{ replicas = 1, slots = 16, max_context = 192, publish = "delta", vllm = {{}} }}
"""
PARITY = """
from agentrl.environments.calculator.env import Calculator


class Parity(Calculator):
    def reward(self, task, episode):
        return float(len(episode.answer) % 2)
"""
"""A task whose rewards differ for a random model."""


def write_large_model(directory: Path, tokenizer: Path) -> int:
    """A random model whose weights outweigh what Ray sends in a run; returns their bytes in bfloat16."""
    shape = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "head_dim": 64}
    vocabulary = json.loads((tokenizer / "config.json").read_text())["vocab_size"]
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**shape, **heads, vocab_size=vocabulary, tie_word_embeddings=True))
    model.bfloat16().save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(tokenizer / name, directory / name)
    return sum(parameter.nbytes for parameter in model.parameters())


def bytes_received(hosts: Hosts, number: int) -> int:
    """By a host, from the others."""
    lines = hosts.run(number, ["cat", "/proc/net/dev"]).stdout.splitlines()[2:]
    return sum(int(line.split(":")[1].split()[0]) for line in lines if line.split(":")[0].strip() != "lo")


@pytest.mark.timeout(1800)
def test_a_vllm_on_another_host_is_sent_the_changes_of_each_version(repository: Path, tmp_path: Path) -> None:
    if reason := unavailable():
        pytest.skip(reason)
    log = tmp_path / "said"
    with Hosts(2) as hosts:
        home = hosts.directory / "1" / "tmp"
        for number in (1, 2):
            size = write_large_model(
                hosts.directory / f"{number}" / "tmp" / "model", repository / "environments/calculator/model"
            )
        (home / "run.toml").write_text(CHANGES)
        (home / "parity.py").write_text(PARITY)
        hosts.start_ray([1, 2], hide=hosts.directory / "1")
        before = bytes_received(hosts, 2)
        with log.open("w") as output:
            process = hosts.start(1, command("train", "/tmp/run.toml"), stdout=output, stderr=output)
        try:
            assert process.wait() == 0, log.read_text()
        finally:
            process.kill()
            process.wait()
        received = bytes_received(hosts, 2) - before
        assert f"node {hosts.address(2)}: engine 0" in log.read_text()
        assert "refused" not in log.read_text()
        run = home / "runs" / "changes"
        assert judge(run) == []
        versions = run / "versions" / "solver"
        stored_whole = [step for step in range(STEPS + 1) if (versions / f"0.{step}" / "model.safetensors").is_file()]
        assert stored_whole == [0, STEPS]
        assert received < 2 * size, f"of versions of {size:,} bytes, one was sent whole"


@pytest.mark.timeout(1200)  # Ray and vLLM, on a machine that is busy
def test_of_each_version_an_engine_on_another_host_gets_the_tensors_and_only_the_header_of_the_file(
    tmp_path: Path,
) -> None:
    if reason := unavailable():
        pytest.skip(reason)
    log, received = tmp_path / "said", dict[str, int]()
    with Hosts(2) as hosts:
        home = hosts.directory / "1" / "tmp"
        (home / "run.toml").write_text(SETTINGS)
        (home / "sums.py").write_text(SUMS)
        hosts.start_ray([1, 2], hide=hosts.directory / "1")
        with log.open("w") as output:
            process = hosts.start(1, command("train", "/tmp/run.toml"), stdout=output, stderr=output)
        try:
            while process.poll() is None:
                for line in hosts.run(2, ["sh", "-c", RECEIVED]).stdout.splitlines():
                    path, size = line.rsplit(" ", 1)
                    received[path] = max(received.get(path, 0), int(size))
                time.sleep(0.1)
        finally:
            process.kill()
            process.wait()
        assert process.returncode == 0, log.read_text()
        assert f"node {hosts.address(2)}: engine 0" in log.read_text()
        run = home / "runs" / "two"
        assert judge(run) == []
        published = [path.stat().st_size for path in run.glob("versions/solver/*/model.safetensors")]
    assert "did not send" not in log.read_text()
    assert len(received) > STEPS // 2, "each is there until the next one serves"
    assert max(received.values()) < min(published) / 10
