"""Tests over real vLLM, started once: `python -m tests.contract.vllm_suite SUITE[:MODEL] [pytest's arguments]`.

SUITE is one of `SUITES`, MODEL an architecture of `engine_kinds.py`; the tests run on a tiny Qwen3 whose head is tied.
`v2_SUITE` runs the suite on vLLM's model runner V2, which GPUs get; see `interpreted_triton.py`.

A process of its own, because vLLM's processes import the main module again, and take what they need from there.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.core.records import PolicyVersion, WeightsRef

if __name__ == "__main__":
    from agentrl.engines.process import PRIVATE_DIRECTORY_VARIABLE, PrivateDirectory

    files = PrivateDirectory()
    os.environ[PRIVATE_DIRECTORY_VARIABLE] = str(files.path)
SWITCH = "AGENTRL_VLLM_SUITE"
"""Set in the process that has vLLM, to the suite and its model."""
V2 = "v2_"

if __name__ == "__main__":
    os.environ[SWITCH] = sys.argv[1]
if __name__ in ("__main__", "__mp_main__"):  # before torch and vLLM, here and in vLLM's processes
    import agentrl.engines.vllm.process  # noqa: F401

    if os.environ[SWITCH].startswith(V2):
        from tests.contract.interpreted_triton import interpret_triton

        interpret_triton()

if TYPE_CHECKING:
    from agentrl.engines.vllm.engine import VllmEngine
    from tests.contract.engine_kinds import ModelZoo

SUITES = {
    "adapters": [
        "test_engine_contract.py",
        "test_interrupted_turns.py",
        "test_engine_vllm.py",
        "test_engine_vllm_calls.py",
        "test_engine_vllm_probe.py",
        "test_engine_vllm_files.py",
        "test_engine_vllm_capacity.py",
    ],
    "full": [
        "test_engine_vllm_full.py",
        "test_engine_vllm_full_probe.py",
        "test_engine_vllm_transfer.py",
        "test_engine_vllm_capacity.py",
    ],
    "adapters_bfloat16": ["test_engine_bfloat16.py"],
    "full_bfloat16": ["test_engine_bfloat16.py"],
    "capture": ["test_engine_vllm_experts.py", "test_engine_vllm_masks.py"],
    "capture_adapters": ["test_engine_vllm_masks.py"],
}
ADAPTER_PLACES = 6
PLACES = {suite: ADAPTER_PLACES if "adapters" in suite else 0 for suite in SUITES}
DTYPES = {suite: "bfloat16" if suite.endswith("bfloat16") else "auto" for suite in SUITES}
SLOTS = 16


def chosen() -> tuple[str, str]:
    """The suite that this process runs, and on which model."""
    suite, _, architecture = os.environ.get(SWITCH, "").removeprefix(V2).partition(":")
    return suite, architecture or "qwen3"


def on_v2() -> bool:
    """Whether this process runs vLLM's model runner V2."""
    return os.environ.get(SWITCH, "").startswith(V2)


class SharedVllm:
    """One vLLM for many engines; closing one of them does not stop it."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.before: dict[str, Callable[[], object]] = {}
        """What is done, once, before vLLM is asked to do the thing of that name."""

    def __getattr__(self, name: str) -> Any:
        self.before.pop(name, lambda: None)()
        return getattr(self._llm, name)

    def shutdown(self) -> None:
        """Others still need it."""


class MakeVllm:
    """Engines over one vLLM of a tiny Qwen3."""

    kind = "vllm"

    def __init__(self, zoo: ModelZoo, llm: Any, runner: asyncio.Runner, *, places: int) -> None:
        self.llm: Any = SharedVllm(llm)
        self._zoo = zoo
        self._runner = runner
        self._places = places
        self._published = 0

    def __call__(
        self, *, max_context: int = 512, refresh: Any = "token", slots: int = SLOTS, versions: Any = None, **more: Any
    ) -> VllmEngine:
        from agentrl.engines.vllm.engine import VllmEngine
        from tests.contract.engine_kinds import START

        options = {"adapter_slots": self._places, "max_context": max_context, "refresh": refresh, "slots": slots}
        settings = vllm_settings(**{**options, **more})
        first = START if self._places else {"solver": START["solver"]}
        return VllmEngine(self.llm, str(self._zoo.directory()), versions=versions or first, settings=settings)

    def publish(self, version: PolicyVersion, seed: int) -> WeightsRef:
        """A random adapter, or the weights of another random model."""
        from tests.contract.engine_kinds import write_adapter

        if self._places == 0:
            return self._zoo.full(version, seed=seed)
        self._published += 1
        directory = self._zoo.root / f"published-{self._published}"
        return write_adapter(directory, version, self._zoo.load(), seed=seed)

    def run(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """In the loop that vLLM was started in; afterwards vLLM serves what it was started with."""
        try:
            self._runner.run(asyncio.wait_for(main(), 250))
        finally:
            self._runner.run(self._restore())

    async def _restore(self) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

        llm = self.llm
        await llm.resume_generation()
        while llm.get_num_unfinished_requests():
            await asyncio.sleep(0.01)
        for number in await llm.list_loras() if self._places else ():
            await llm.remove_lora(number)
        if self._places == 0:
            await llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
            await llm.start_weight_update()
            await llm.update_weights(WeightTransferUpdateRequest(update_info={}))
            await llm.finish_weight_update(weight_version="default")
        await llm.reset_prefix_cache()


def vllm_settings(
    *, max_context: int = 512, refresh: Any = "token", slots: int = SLOTS, adapter_slots: int, **more: Any
) -> Any:
    """As the suite starts vLLM, or as one engine over it is made."""
    from agentrl.engines.vllm.startup import VllmSettings

    suite, architecture = chosen()
    captures = on_v2() and suite.startswith("capture")
    settings = {
        "keep_kv": True,
        "capture_routing": captures and architecture == "qwen3_moe",
        "capture_mask": captures,
        "max_rank": 8,
        "max_staleness": {},
        "dtype": DTYPES[suite],
        **more,
    }
    return VllmSettings(slots=slots, max_context=max_context, refresh=refresh, adapter_slots=adapter_slots, **settings)


def started(zoo: ModelZoo) -> Iterator[MakeVllm]:
    """Start vLLM, and stop it at the end."""
    from agentrl.engines.vllm.startup import prefill_rate, start_vllm

    places = PLACES[chosen()[0]]

    async def start() -> Any:
        llm = start_vllm(str(zoo.directory()), vllm_settings(adapter_slots=places))
        await prefill_rate(llm)  # its first passes are slow, and no part of the test that happens to come first
        return llm

    async def stop(llm: Any) -> None:
        """In its loop: outside of one it leaves sockets open, and whatever collects them later may wait forever."""
        llm.shutdown()

    with asyncio.Runner() as runner:
        llm = runner.run(start())
        yield MakeVllm(zoo, llm, runner, places=places)
        runner.run(stop(llm))


if __name__ == "__main__":
    import pytest

    here = Path(__file__).parent
    named = any(".py" in each for each in sys.argv[2:])
    tests = [] if named else [str(here / file) for file in SUITES[chosen()[0]]]
    options = ["-q", "-p", "no:cacheprovider", "-o", "timeout=900", "-W", "default"]
    code = pytest.main([*tests, *sys.argv[2:], *options])
    files.remove()
    sys.stdout.flush()
    os._exit(code)
