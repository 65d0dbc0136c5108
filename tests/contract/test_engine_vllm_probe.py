"""The probe of a version, answered by vLLM with adapters; full weights are in `test_engine_vllm_full.py`."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.errors import EngineError
from tests.contract.engine_kinds import ModelZoo, prompt, request, version
from tests.contract.test_engine_adapters import with_adapter
from tests.contract.test_engine_probe import moved, publish_adapter, vanished
from tests.contract.test_engine_vllm import COPIES, check_spans, copies, steps
from tests.contract.vllm_suite import MakeVllm


@pytest.mark.parametrize("refresh", ["token", "lazy"])
def test_an_adapter_that_is_another_is_found_by_its_probe_and_what_it_sampled_is_forgotten(
    make_vllm: MakeVllm, zoo: ModelZoo, tmp_path: Path, refresh: str
) -> None:
    async def main() -> None:
        engine: Any = make_vllm(refresh=refresh)
        before, heard = copies(), dict[str, list[tuple[int, int]]]()

        def on_delta(request_id: str, token_ids: Any, logprobs: Any, sampler: Any) -> None:
            heard.setdefault(request_id, []).extend((token, sampler.step) for token in token_ids)

        def call(name: str, max_tokens: int) -> asyncio.Future[Any]:
            session = engine.open(name, "solver")
            return asyncio.ensure_future(
                session.generate(request(name, prompt(12), max_tokens=max_tokens, seed=len(name)), on_delta)
            )

        first = publish_adapter(zoo, tmp_path / "1", 1, seed=1)
        await engine.update(first)
        loaded = await make_vllm.llm.list_loras()
        calls = {"running": call("running", 400)}
        while not heard:
            await asyncio.sleep(0.01)

        def swap() -> None:
            for path in COPIES.glob("adapters-*/*/adapter_model.safetensors"):
                shutil.copyfile(Path(first.path) / path.name, path)

        right = publish_adapter(zoo, tmp_path / "2", 2, seed=1, trained=moved(1e-3))
        wrong = {
            "those its trainer computed": publish_adapter(zoo, tmp_path / "3", 3, seed=2, served_seed=3),
            "as the model the run began with": publish_adapter(zoo, tmp_path / "4", 4, seed=4, served=vanished),
            r"as solver@0\.1 would": right,
        }
        for message, weights in wrong.items():
            if weights is right:
                make_vllm.llm.before["add_lora"] = swap  # between our check and vLLM's reading
            updating = asyncio.ensure_future(engine.update(weights))
            while engine._versions.of_policy("solver").version != weights.version:
                await asyncio.sleep(0)
            with pytest.raises(EngineError, match="not answered its probe"):
                engine.open("pinned", "solver", pin=weights.version)
            calls[f"tried {weights.version}"] = call(f"tried {weights.version}", 60)
            with pytest.raises(EngineError, match=f"{weights.version} refused: .*{message}"):
                await updating
            with pytest.raises(EngineError, match="is not served here"):
                engine.open("pinned", "solver", pin=weights.version)
        assert not await make_vllm.llm.is_paused()
        assert await make_vllm.llm.list_loras() == loaded
        assert len(copies() - before) == 1, "the first adapter's copy"
        models = {version(1): with_adapter(zoo, first), right.version: with_adapter(zoo, right)}
        for name, running in calls.items():
            completion = await running
            assert steps(completion) == [1]
            assert len(completion.token_ids) == (400 if name == "running" else 60)
            check_spans(models, prompt(12), completion)
            tokens = [(int(token), 1) for token in completion.token_ids]
            assert heard.get(name, []) == tokens[: len(heard.get(name, []))]
        await engine.update(right)
        completion = await call("after", 8)
        assert steps(completion) == [2]
        check_spans(models, prompt(12), completion)
        await engine.close()

    make_vllm.run(main)
