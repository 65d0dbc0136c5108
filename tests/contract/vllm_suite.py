"""The contract suite over real vLLM, started once: `python -m tests.contract.vllm_suite [pytest's arguments]`.

A process of its own, because vLLM's processes import the main module again, and take what they need from there.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any

from agentrl.core.records import PolicyVersion, WeightsRef

if __name__ in ("__main__", "__mp_main__"):  # before torch and vLLM, here and in vLLM's processes
    pass

if TYPE_CHECKING:
    from agentrl.core.ports import Engine
    from tests.contract.engine_kinds import ModelZoo

SWITCH = "AGENTRL_VLLM_SUITE"
"""Set in the process that has vLLM."""
PLACES = 6


class SharedVllm:
    """One vLLM for many engines; closing one of them does not stop it."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def shutdown(self) -> None:
        """Others still need it."""


class MakeVllm:
    """Engines over one vLLM that was started for adapters of a tiny Qwen3."""

    kind = "vllm"

    def __init__(self, zoo: ModelZoo, llm: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._zoo = zoo
        self._llm = SharedVllm(llm)
        self._loop = loop
        self._published = 0

    def __call__(self, *, max_context: int = 512, refresh: Any = "token", slots: int = 16) -> Engine:
        from agentrl.engines.vllm_engine import VllmEngine
        from tests.contract.engine_kinds import START

        settings = vllm_settings(max_context=max_context, refresh=refresh, slots=slots)
        llm: Any = self._llm
        return VllmEngine(llm, str(self._zoo.directory()), versions=START, settings=settings)

    def publish(self, version: PolicyVersion, seed: int) -> WeightsRef:
        """A random adapter."""
        from tests.contract.engine_kinds import write_adapter

        self._published += 1
        directory = self._zoo.root / f"published-{self._published}"
        return write_adapter(directory, version, self._zoo.load(), seed=seed)

    def run(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """In the loop that vLLM was started in."""
        self._loop.run_until_complete(main())


def vllm_settings(*, max_context: int = 512, refresh: Any = "token", slots: int = 16) -> Any:
    """As the suite starts vLLM."""
    from agentrl.engines.vllm_start import VllmSettings

    return VllmSettings(
        slots=slots,
        max_context=max_context,
        refresh=refresh,
        keep_kv=True,
        adapter_slots=PLACES,
        max_rank=8,
        max_staleness=1,
    )


def started(zoo: ModelZoo) -> Iterator[MakeVllm]:
    """Start vLLM, and stop it at the end."""
    from agentrl.engines.vllm_start import start_vllm

    async def start() -> Any:
        return start_vllm(str(zoo.directory()), vllm_settings())

    loop = asyncio.new_event_loop()
    llm = loop.run_until_complete(start())
    yield MakeVllm(zoo, llm, loop)
    llm.shutdown()
    loop.close()


if __name__ == "__main__":
    import pytest

    os.environ[SWITCH] = "1"
    arguments = sys.argv[1:] or ["tests/contract/test_engine_contract.py", "tests/contract/test_engine_vllm.py"]
    sys.exit(pytest.main([*arguments, "-q", "-p", "no:cacheprovider", "-o", "timeout=300", "-W", "default"]))
