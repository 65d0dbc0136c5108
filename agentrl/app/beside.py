"""Episodes beside a run: by the same runner and engine as training, with nothing trained. For evaluation and forks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.app.assemble import Past, attach_worker, make_dispatcher
from agentrl.config.run import LoraConfig, RunConfig
from agentrl.core.clock import SystemClock
from agentrl.core.files import sha256_of
from agentrl.core.records import EpisodeHeader, PolicyVersion, WeightsRef
from agentrl.credit.advantages import ADVANTAGES
from agentrl.orchestrator.buffer import EpisodeBuffer
from agentrl.orchestrator.signal import Signal

if TYPE_CHECKING:
    from agentrl.core.ports import ChatFormat, Engine
    from agentrl.environment.base import Environment
    from agentrl.journal.port import JournalStore
    from agentrl.orchestrator.dispatch import Dispatcher


def given_weights(config: RunConfig, name: str, directory: str | Path | None) -> tuple[RunConfig, WeightsRef | None]:
    """A configuration in which policy `name` is what lies in a directory, and the adapter to serve, if it is one.

    Args:
        config: as it was.
        name: of the policy.
        directory: a model or an adapter, such as a run's `policies/NAME`; None for the base model.
    """
    if directory is None:
        return config, None
    if not (Path(directory) / "adapter_config.json").exists():
        return config.model_copy(update={"model": config.model.model_copy(update={"path": str(directory)})}), None
    digest = sha256_of(Path(directory) / "adapter_model.safetensors")
    adapter = WeightsRef(version=PolicyVersion(name, 0, 1), path=str(directory), kind="adapter", sha256=digest)
    rank = int(json.loads((Path(directory) / "adapter_config.json").read_text(encoding="utf-8"))["r"])
    adapted = config.policies[name].model_copy(update={"lora": LoraConfig(rank=rank)})
    return config.model_copy(update={"policies": {**config.policies, name: adapted}}), adapter


async def play_beside(
    config: RunConfig,
    environment: type[Environment],
    engine: Engine,
    chat_format: ChatFormat,
    store: JournalStore,
    play: Callable[[Dispatcher], Coroutine[Any, Any, list[EpisodeHeader]]],
) -> list[EpisodeHeader]:
    """What `play` makes of a dispatcher without a buffer; what no episode can be blamed for is raised."""
    loop = asyncio.get_running_loop()
    failure: asyncio.Future[list[EpisodeHeader]] = loop.create_future()

    def fail(error: BaseException) -> None:
        if not failure.done():
            failure.set_exception(error)

    buffer = EpisodeBuffer((), ADVANTAGES[config.credit.advantage])
    dispatcher = make_dispatcher(config, environment, buffer, store, Signal(), past=Past())
    attach_worker(config, environment, dispatcher, engine, chat_format, store, SystemClock(), fail)
    episodes = loop.create_task(play(dispatcher))
    try:
        first, _ = await asyncio.wait({episodes, failure}, return_when=asyncio.FIRST_COMPLETED)
        return first.pop().result()
    finally:
        episodes.cancel()
        failure.cancel()
        await dispatcher.worker.cancel()
