"""vLLM's own copies of published adapters: what was checked is what it reads; files that must be refused."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.errors import EngineError
from agentrl.engines.process import PRIVATE_DIRECTORY_VARIABLE
from tests.contract.engine_kinds import ModelZoo, check_logprobs, check_refused, prompt, request, version
from tests.contract.test_engine_adapters import SPOILT_ADAPTERS, with_adapter
from tests.contract.test_engine_vllm import adapter, in_flight, steps, unloaded
from tests.contract.vllm_server import ADAPTER_PLACES, MakeVllm

FILE = "adapter_model.safetensors"
COPIES = Path(os.environ.get(PRIVATE_DIRECTORY_VARIABLE, ""))
"""Where private copies lie."""


def copies() -> set[Path]:
    return {path for engine in COPIES.glob("weights-*") for path in (engine, *engine.iterdir())}


def spoil_copies() -> None:
    for path in COPIES.glob(f"weights-*/*/{FILE}"):
        path.unlink()


def test_a_directory_that_is_written_again_or_removed_changes_nothing_that_serves(
    make_vllm: MakeVllm, zoo: ModelZoo, tmp_path: Path
) -> None:
    async def main() -> None:
        engine, context, models = make_vllm(), prompt(70), {}
        pinned = []
        for step in (1, 2):
            weights = adapter(zoo, tmp_path / "same", step)
            models[step] = with_adapter(zoo, weights)
            pinned.append(weights)
            await engine.serve([weights], pinned)
            shutil.rmtree(tmp_path / "same")
        for step in (1, 2, 1):
            session = engine.open(f"s{step}", "solver", pin=version(step))
            completion = await session.generate(request("r", context))
            assert steps(completion) == [step]
            check_logprobs(models[step], context, completion)
            session.close()
        await engine.close()

    make_vllm.run(main)


def test_what_vllm_is_given_is_what_was_checked_though_the_file_keeps_changing(
    make_vllm: MakeVllm, zoo: ModelZoo, tmp_path: Path
) -> None:
    good = adapter(zoo, tmp_path / "good", 1)
    contents = [Path(adapter(zoo, tmp_path / f"{step}", step).path, FILE).read_bytes() for step in (1, 2)]
    stop = threading.Event()

    def change() -> None:
        for content in itertools.cycle(contents):
            (tmp_path / "new").write_bytes(content)
            (tmp_path / "new").replace(Path(good.path, FILE))
            if stop.is_set():
                return

    async def main() -> None:
        before, served, engine = copies(), 0, make_vllm()
        changing = asyncio.create_task(asyncio.to_thread(change))
        try:
            for step in range(1, 40):
                with contextlib.suppress(EngineError):  # the file was the other one when it was copied
                    await engine.serve([replace(good, version=version(step))])
                    newest = max((path for path in copies() - before if path.name.isdigit()), key=lambda p: int(p.name))
                    assert (newest / FILE).read_bytes() == contents[0]
                    served += 1
        finally:
            stop.set()
            await changing
        assert served
        await engine.close()

    make_vllm.run(main)


def test_a_version_id_is_never_served_with_other_weights(make_vllm: MakeVllm, zoo: ModelZoo, tmp_path: Path) -> None:
    async def main() -> None:
        engine = make_vllm()
        weights = adapter(zoo, tmp_path / "1", 1)
        await engine.serve([weights])
        await engine.serve([weights])  # a repeated delivery
        with pytest.raises(EngineError, match="never reused"):
            await engine.serve([adapter(zoo, tmp_path / "other", 1, seed=7)])
        completion = await engine.open("s", "solver").generate(request("r", prompt(9)))
        check_logprobs(with_adapter(zoo, weights), prompt(9), completion)
        assert len(await make_vllm.llm.list_loras()) == 1
        await engine.close()

    make_vllm.run(main)


SPOILT: dict[str, tuple[dict[str, Any], str]] = {
    **SPOILT_ADAPTERS,
    "rank too large": ({"rank": 9}, "at most 8"),
}
SPOILT_FILES = {"truncated": "SHA-256", "digest": "SHA-256", "no config": "adapter_config", "absent": "cannot be read"}


@pytest.mark.parametrize("fault", sorted({*SPOILT, *SPOILT_FILES}))
def test_spoilt_adapters_are_refused_and_the_old_version_serves(
    make_vllm: MakeVllm, zoo: ModelZoo, tmp_path: Path, fault: str
) -> None:
    options, message = SPOILT.get(fault) or ({}, SPOILT_FILES[fault])
    directory = tmp_path / "spoilt"
    weights = adapter(zoo, directory, 1, **options)
    file = directory / FILE
    match fault:
        case "truncated":
            file.write_bytes(file.read_bytes()[:-10])
        case "digest":
            weights = replace(weights, sha256="0" * 64)
        case "no config":
            (directory / "adapter_config.json").unlink()
        case "absent":
            shutil.rmtree(directory)

    async def main() -> None:
        engine: Any = make_vllm()
        await check_refused(engine, zoo, weights, message)
        assert not await make_vllm.llm.is_paused()
        assert not await make_vllm.llm.list_loras()

    make_vllm.run(main)


def test_an_adapter_that_vllm_itself_cannot_load_is_refused(make_vllm: MakeVllm, zoo: ModelZoo, tmp_path: Path) -> None:
    async def main() -> None:
        engine: Any = make_vllm()
        before = copies()
        make_vllm.llm.before["collective_rpc"] = spoil_copies
        await check_refused(engine, zoo, adapter(zoo, tmp_path / "1", 1), r"solver@0\.1 refused: vLLM cannot load it")
        assert copies() <= before, "closed: no copy is left"

    make_vllm.run(main)


def test_a_version_that_nothing_needs_is_unloaded_and_its_copy_removed(
    make_vllm: MakeVllm, zoo: ModelZoo, tmp_path: Path
) -> None:
    async def main() -> None:
        before = copies()
        engine = make_vllm()
        held = engine.open("s", "solver")
        for step in range(1, 2 * ADAPTER_PLACES):
            cut = asyncio.ensure_future(held.generate(request(f"r{step}", prompt(9), max_tokens=400)))
            await in_flight(engine)
            await engine.serve([adapter(zoo, tmp_path / f"{step}", step)])
            await in_flight(engine)
            cut.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cut
            await unloaded(make_vllm, 1)
        async with asyncio.timeout(100):
            while len(copies() - before) > 2:  # the engine's directory, and the newest adapter's
                await asyncio.sleep(0.01)
        await engine.close()
        assert copies() <= before

    make_vllm.run(main)


def test_an_update_cancelled_while_vllm_reads_its_files_serves_them(
    make_vllm: MakeVllm, zoo: ModelZoo, tmp_path: Path
) -> None:
    async def main() -> None:
        engine = make_vllm()
        context = prompt(20)
        first = adapter(zoo, tmp_path / "1", 1)
        updating = asyncio.ensure_future(engine.serve([first]))
        make_vllm.llm.before["collective_rpc"] = updating.cancel
        with pytest.raises(asyncio.CancelledError):
            await updating
        completion = await engine.open("s", "solver").generate(request("a", context))
        assert [span.version.step for span in completion.spans] == [1]
        check_logprobs(with_adapter(zoo, first), context, completion)
        await engine.close()

    make_vllm.run(main)
