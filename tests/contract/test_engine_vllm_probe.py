"""The canary of a version, answered by vLLM with adapters; full weights are in `test_engine_vllm_full_probe.py`."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.errors import EngineError
from agentrl.core.records import PolicyVersion, WeightsRef
from agentrl.core.tokens import Completion, Tokens
from tests.contract.engine_kinds import ModelZoo, prompt, request, version
from tests.contract.test_engine_adapters import with_adapter
from tests.contract.test_engine_probe import moved, publish_adapter, vanished
from tests.contract.test_engine_vllm import check_spans, steps
from tests.contract.test_engine_vllm_files import COPIES, copies
from tests.contract.vllm_server import MakeVllm


class Calls:
    """Calls of one engine, and what was heard of them before they ended."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.heard: dict[str, list[tuple[int, int]]] = {}
        self.running: dict[str, asyncio.Future[Completion]] = {}

    def start(self, name: str, max_tokens: int) -> asyncio.Future[Completion]:
        session = self._engine.open(name, "solver")
        asked = request(name, prompt(12), max_tokens=max_tokens, seed=len(name))
        self.running[name] = asyncio.ensure_future(session.generate(asked, self._listen))
        return self.running[name]

    def _listen(self, request_id: str, tokens: Tokens) -> None:
        (span,) = tokens.spans
        self.heard.setdefault(request_id, []).extend((int(token), span.version.step) for token in tokens.token_ids)

    async def check(self, step: int, models: dict[PolicyVersion, Any]) -> None:
        """All are of this step, to their last token, and so is all that was heard."""
        for name, running in self.running.items():
            completion = await running
            assert steps(completion) == [step]
            assert completion.finish_reason == "length"
            check_spans(models, prompt(12), completion)
            heard = self.heard.get(name, [])
            assert heard == [(int(token), step) for token in completion.token_ids][: len(heard)]
        self.running.clear()


def swapped(source: WeightsRef) -> Callable[[], None]:
    """Put an adapter in the place of all private copies."""

    def swap() -> None:
        for path in COPIES.glob("weights-*/*/adapter_model.safetensors"):
            shutil.copyfile(Path(source.path) / path.name, path)

    return swap


@pytest.mark.parametrize("refresh", ["token", "lazy"])
def test_an_adapter_that_is_another_is_found_by_its_probe_and_what_it_sampled_is_forgotten(
    make_vllm: MakeVllm, zoo: ModelZoo, tmp_path: Path, refresh: str
) -> None:
    async def main() -> None:
        engine: Any = make_vllm(refresh=refresh)
        before, calls = copies(), Calls(engine)
        first = publish_adapter(zoo, tmp_path / "1", 1, seed=1)
        right = publish_adapter(zoo, tmp_path / "2", 2, seed=1, trained=moved(1e-3))
        await engine.serve([first])
        loaded = await make_vllm.llm.list_loras()
        calls.start("running", 400)
        while not calls.heard:
            await asyncio.sleep(0.01)
        for message, weights in (
            ("those the trainer computed", publish_adapter(zoo, tmp_path / "3", 3, seed=2, served_seed=3)),
            ("as the model the run began with", publish_adapter(zoo, tmp_path / "4", 4, seed=4, served=vanished)),
            (r"as solver@0\.1 would", right),
        ):
            if weights is right:  # between our check and vLLM's reading
                make_vllm.llm.before["collective_rpc"] = swapped(first)
            updating = asyncio.ensure_future(engine.serve([weights]))
            while engine.versions.of_policy("solver").version != weights.version:
                await asyncio.sleep(0)
            calls.start(f"tried {weights.version}", 60)
            with pytest.raises(EngineError, match="not passed its canary check"):
                engine.open("pinned", "solver", pin=weights.version)
            with pytest.raises(EngineError, match=f"{weights.version} refused: .*{message}"):
                await updating
            with pytest.raises(EngineError, match="is not served here"):
                engine.open("pinned", "solver", pin=weights.version)
        assert not await make_vllm.llm.is_paused()
        assert await make_vllm.llm.list_loras() == loaded
        assert len(copies() - before) == 1, "the first adapter's copy"
        models = {version(1): with_adapter(zoo, first), version(2): with_adapter(zoo, right)}
        await calls.check(1, models)
        await engine.serve([right])
        calls.start("after", 8)
        await calls.check(2, models)
        await engine.close()

    make_vllm.run(main)
