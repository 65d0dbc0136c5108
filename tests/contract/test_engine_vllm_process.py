"""Real vLLM: its supervised process, and what it cannot be started on."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from agentrl.core.errors import EngineCapabilityError, EngineError, EngineLostError
from agentrl.core.tokens import Tokens
from agentrl.engines.process import PRIVATE_DIRECTORY_VARIABLE, ChildProgram, LocalPlacement
from agentrl.engines.remote.client import ProcessEngine
from tests.contract.engine_kinds import START, ModelZoo, check_logprobs, prompt, request, version, write_adapter
from tests.contract.test_engine_adapters import with_adapter
from tests.contract.test_engine_process import NoWaiting
from tests.contract.vllm_suite import MISSING
from tests.model_families import write_released
from tests.processes import can_be_reached, is_loopback, session_of

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason=MISSING)
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]
SHARED_MEMORY = Path("/dev/shm")


def program(path: Path, **options: Any) -> ChildProgram:
    arguments = {"model_path": str(path), "adapter_slots": 3, "max_rank": 8, "slots": 8, **options}
    return ChildProgram("agentrl.engines.vllm.engine:VllmEngine.load", arguments, module="agentrl.engines.vllm.process")


async def gone(leader: int) -> None:
    """Wait until nothing of a session runs."""
    async with asyncio.timeout(100):
        while session_of(leader):
            await asyncio.sleep(0.02)


def private_name(leader: int) -> str:
    """Under which a process and what it starts keep their files."""
    variables = Path(f"/proc/{leader}/environ").read_bytes().decode().split("\0")
    return next(
        Path(each.partition("=")[2]).name for each in variables if each.startswith(f"{PRIVATE_DIRECTORY_VARIABLE}=")
    )


def files_of(names: set[str]) -> list[str]:
    """What lies in shared memory under these names."""
    return [each.name for each in SHARED_MEMORY.iterdir() if any(name in each.name for name in names)]


async def cut(engine: ProcessEngine, session: Any, context: Any, victim: str) -> list[int]:
    """Kill one of its processes in the middle of a turn; what was heard of it."""
    heard: list[int] = []
    begun = asyncio.Event()

    def on_delta(request_id: str, tokens: Tokens) -> None:
        assert tokens.spans[0].version == version(2)
        heard.extend(tokens.token_ids.tolist())
        begun.set()

    running = asyncio.ensure_future(session.generate(request("r", context, seed=3, max_tokens=460), on_delta))
    await begun.wait()
    leader = engine.supervisor.process_id
    assert leader is not None
    named = [process for process, name in session_of(leader).items() if name.startswith(victim)]
    os.kill(named[0] if named else leader, signal.SIGKILL)
    async with asyncio.timeout(100):
        with pytest.raises(EngineLostError, match="died"):
            await running
    assert 0 < len(heard) < 460
    await gone(leader)
    return heard


def beside_others(zoo: ModelZoo, directory: Path) -> Path:
    """A model beside files that vLLM, left to itself, would take for the model."""
    shutil.copytree(zoo.directory(), directory)
    index = {"weight_map": dict.fromkeys(load_file(directory / "model.safetensors"), "model.safetensors")}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"odd": np.zeros(1)}, directory / "consolidated.safetensors")
    (directory / "params.json").write_text("no configuration")
    (directory / "pytorch_model.bin").write_text("no pickle")
    return directory


@pytest.mark.exhaustive
@needs_vllm
def test_whichever_of_its_processes_dies_the_turn_goes_on_in_the_next(
    zoo: ModelZoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host dies first, then the engine core, and the engine is closed while the next process starts."""
    context = prompt(40)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    directory = beside_others(zoo, tmp_path / "model")

    async def main() -> None:
        engine = await ProcessEngine(program(directory), START, clock=NoWaiting()).ready()
        assert engine.supervisor.process_id is not None
        assert (engine.capabilities.kv_tokens or 0) >= 8 * 512, "what its slots need"
        assert 0 < engine.capabilities.prefill_rate < math.inf
        assert engine.busy_seconds() == 0
        private = {private_name(engine.supervisor.process_id)}
        assert len(files_of(private)) > 1, "its directory, and shared memory"
        processes = session_of(engine.supervisor.process_id)
        assert "VLLM::EngineCor" in processes.values()
        reached = list(can_be_reached(processes))
        assert any(each.startswith("tcp") for each in reached), "torch's rendezvous is among them"
        assert [each for each in reached if not is_loopback(each)] == []
        written = [write_adapter(tmp_path / f"{step}", version(step), zoo.load(), seed=step) for step in (1, 2)]
        models = [zoo.load(), *(with_adapter(zoo, weights) for weights in written)]
        await engine.serve(written[:1], written[:1])
        pinned = engine.open("pinned", "solver", pin=version(1))
        await engine.serve(written[1:], written[:1])
        session = engine.open("s", "solver")
        heard = await cut(engine, session, context, "the host")
        longer = np.concatenate([context, np.array(heard, np.int32)])
        rest, older, base = await asyncio.gather(
            session.generate(request("r", longer, seed=3, max_tokens=20, sampled_before=len(heard))),
            pinned.generate(request("p", context)),
            engine.open("b", "proposer").generate(request("b", context)),
        )
        assert engine.supervisor.losses == 1
        assert files_of(private) == []
        private = {private_name(engine.supervisor.process_id)}
        for tokens, completion, step in ((longer, rest, 2), (context, older, 1), (context, base, 0)):
            assert [span.version.step for span in completion.spans] == [step]
            check_logprobs(models[step], tokens, completion)
        dead = {None, engine.supervisor.process_id}
        await cut(engine, session, context, "VLLM::EngineCor")
        while engine.supervisor.process_id in dead:
            await asyncio.sleep(0.01)
        starting = engine.supervisor.process_id
        assert starting is not None
        private.add(private_name(starting))
        await engine.close()
        await gone(starting)
        assert files_of(private) == []
        assert list(temporary.iterdir()) == []

    asyncio.run(main())


_PARENT = """
import asyncio, json, sys
from pathlib import Path
from tests.contract.test_engine_vllm_process import START, ProcessEngine, program
from tests.processes import session_of

async def main():
    engine = ProcessEngine(program(Path(sys.argv[1])), START)
    while engine.supervisor.process_id is None:
        await asyncio.sleep(0.01)
    leader = engine.supervisor.process_id
    while len(found := session_of(leader)) < 3:
        await asyncio.sleep(0.05)
    print(json.dumps([leader, *found]), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.exhaustive
@needs_vllm
def test_nothing_of_it_outlives_its_parent(repository: Path, zoo: ModelZoo) -> None:
    command = [sys.executable, "-c", _PARENT, str(zoo.directory())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=repository) as parent:
        assert parent.stdout is not None
        leader, *processes = json.loads(parent.stdout.readline())
        watches = [os.pidfd_open(process) for process in processes]
        parent.kill()
    for watch in watches:
        assert select.select([watch], [], [], 100)[0], "a process of vLLM's outlived its parent"
        os.close(watch)
    assert session_of(leader) == {}


@pytest.mark.exhaustive
@needs_vllm
def test_a_model_that_vllm_does_not_know_is_refused_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = {"model_type": "openai-gpt", "architectures": ["OpenAIGPTLMHeadModel"], "n_positions": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))

    async def main() -> None:
        engine = ProcessEngine(program(tmp_path), START)
        async with asyncio.timeout(200):
            with pytest.raises(EngineError, match=r"vLLM does not start on .*OpenAIGPT") as raised:
                await engine.ready()
        assert "\n" not in str(raised.value)
        assert engine.supervisor.losses == 0
        await engine.close()

    asyncio.run(main())
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.exhaustive
@needs_vllm
@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="vLLM imports the class")
def test_the_package_that_a_class_for_images_needs_is_named(tmp_path: Path) -> None:
    async def main() -> None:
        path = write_released("Gemma 3, with images", tmp_path / "model")
        engine = ProcessEngine(program(path, max_context=64), START, placement=LocalPlacement(tmp_path / "engine.log"))
        async with asyncio.timeout(500):
            with pytest.raises(EngineError, match=r"does not start on .*No module named 'torchvision'; its output is"):
                await engine.ready()
        await engine.close()

    asyncio.run(main())


@pytest.mark.exhaustive
@needs_vllm
@pytest.mark.parametrize(("captured", "setting"), [("capture_mask", "top_p"), ("capture_routing", "capture_routing")])
def test_what_the_model_runner_of_cpus_does_not_return_is_refused(zoo: ModelZoo, captured: str, setting: str) -> None:
    async def main() -> None:
        engine = ProcessEngine(program(zoo.directory("qwen3_moe"), adapter_slots=0, **{captured: True}), START)
        async with asyncio.timeout(200):
            with pytest.raises(EngineCapabilityError, match=rf"{setting}.*model runner V2"):
                await engine.ready()
        await engine.close()

    asyncio.run(main())


def test_without_vllm_the_engine_says_what_is_missing(
    zoo: ModelZoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "vllm.py").write_text("raise ModuleNotFoundError(\"No module named 'vllm'\", name='vllm')")
    monkeypatch.syspath_prepend(str(tmp_path))

    async def main() -> None:
        engine = ProcessEngine(program(zoo.directory()), START)
        with pytest.raises(EngineCapabilityError, match=r"needs the package vllm.*install the extra"):
            await engine.ready()
        await engine.close()

    asyncio.run(main())
    assert "Traceback" not in capfd.readouterr().err
