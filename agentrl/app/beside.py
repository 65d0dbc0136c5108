"""Episodes beside a run: by the same runner and engine as training, with nothing trained. For evaluation and forks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from agentrl.app.assemble import Past, attach_worker, make_dispatcher
from agentrl.config.policies import FrozenPolicy
from agentrl.config.run import RunConfig
from agentrl.core.clock import SystemClock
from agentrl.core.records import EpisodeHeader, WeightsRef
from agentrl.credit.advantages import ADVANTAGES
from agentrl.orchestrator.buffer import EpisodeBuffer
from agentrl.orchestrator.groups import WholeGroups
from agentrl.orchestrator.signal import Signal

if TYPE_CHECKING:
    from agentrl.core.ports import ChatFormat, Engine
    from agentrl.environment.base import Environment
    from agentrl.journal.port import JournalStore
    from agentrl.orchestrator.dispatch import Dispatcher


def with_weights(config: RunConfig, given: Sequence[WeightsRef]) -> RunConfig:
    """The configuration with an engine that can serve what is given, however the policies are trained."""
    frozen = {
        weights.version.policy: FrozenPolicy(
            kind="frozen", path=weights.path, sampling=config.sampling_of(weights.version.policy).model_dump()
        )
        for weights in given
    }
    return config.model_copy(update={"policies": {**config.policies, **frozen}})


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

    buffer = EpisodeBuffer((), WholeGroups((), ADVANTAGES["none"]))
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
