"""The process of a suite over real vLLM: `python -m tests.contract.vllm_server [pytest's arguments]`.

Runs pytest, without a loop of its own: it reads the tests to run from standard input, one a line with the one after it,
and writes their reports to standard output, as `vllm_suite.py` asks. vLLM's processes import this module too.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, TextIO

from agentrl.core.records import PolicyVersion, WeightsRef
from tests.contract.vllm_suite import SUITE_VARIABLE, V2, VllmSuite

if __name__ == "__main__":
    from agentrl.engines.process import PRIVATE_DIRECTORY_VARIABLE, PrivateDirectory

    files = PrivateDirectory()
    os.environ[PRIVATE_DIRECTORY_VARIABLE] = str(files.path)
if __name__ in ("__main__", "__mp_main__"):  # before torch and vLLM, here and in vLLM's processes
    import agentrl.engines.vllm.process  # noqa: F401

    if os.environ[SUITE_VARIABLE].startswith(V2):
        from tests.contract.interpreted_triton import interpret_triton

        interpret_triton()

if TYPE_CHECKING:
    import pytest

    from agentrl.engines.vllm.engine import VllmEngine
    from tests.contract.engine_kinds import ModelZoo

ADAPTER_PLACES = 6
SLOTS = 16


def chosen() -> tuple[str, str]:
    """The suite that this process runs, and on which model."""
    name = os.environ.get(SUITE_VARIABLE, "")
    return VllmSuite(name).base, name.partition(":")[2] or "qwen3"


def on_v2() -> bool:
    """Whether this process runs vLLM's model runner V2."""
    return os.environ.get(SUITE_VARIABLE, "").startswith(V2)


def adapter_places(suite: str) -> int:
    """Number of adapters that a suite's vLLM holds."""
    return ADAPTER_PLACES if "adapters" in suite else 0


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
        "dtype": "bfloat16" if suite.endswith("bfloat16") else "auto",
        **more,
    }
    return VllmSettings(slots=slots, max_context=max_context, refresh=refresh, adapter_slots=adapter_slots, **settings)


def started(zoo: ModelZoo) -> Iterator[MakeVllm]:
    """Start vLLM, and stop it at the end."""
    from agentrl.engines.vllm.startup import prefill_rate, start_vllm

    places = adapter_places(chosen()[0])

    async def start() -> Any:
        llm = start_vllm(str(zoo.directory()), vllm_settings(adapter_slots=places))
        # Its first passes are slow, and no part of the test that happens to come first.
        await prefill_rate(llm, str(zoo.directory()))
        return llm

    async def stop(llm: Any) -> None:
        """In its loop: outside of one it leaves sockets open, and whatever collects them later may wait forever."""
        llm.shutdown()

    with asyncio.Runner() as runner:
        llm = runner.run(start())
        yield MakeVllm(zoo, llm, runner, places=places)
        runner.run(stop(llm))


class RequestedTests:
    """A pytest plugin that runs the tests another process asks for."""

    def __init__(self, requests: TextIO, reports: TextIO) -> None:
        self._requests = requests
        self._reports = reports

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        for line in self._requests:
            test, next_test = json.loads(line)
            session.config.hook.pytest_runtest_protocol(item=items[test], nextitem=items.get(next_test))
            self._write({})
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._write(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))

    def pytest_configure(self, config: pytest.Config) -> None:
        self._config = config

    def _write(self, message: dict[str, Any]) -> None:
        self._reports.write(json.dumps(message) + "\n")
        self._reports.flush()


if __name__ == "__main__":
    import pytest

    requested = RequestedTests(os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)  # what prints goes to the log
    options = [f"--vllm-suite={os.environ[SUITE_VARIABLE]}", "-p", "tests.contract.vllm_suite"]
    options += ["-q", "-p", "no:cacheprovider", "-o", "timeout=900", "-W", "default"]
    code = pytest.main([*sys.argv[1:], *options], plugins=[requested])
    files.remove()
    sys.stdout.flush()
    os._exit(code)
