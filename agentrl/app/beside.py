"""Episodes beside a run: by the same runner and engine as training, with nothing trained. For evaluation and forks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from agentrl.app.assemble import Past, attach_worker, make_dispatcher
from agentrl.config.run import LoraConfig, RunConfig
from agentrl.core.clock import SystemClock
from agentrl.core.errors import EngineError, InputError
from agentrl.core.files import WEIGHT_FILES, sha256_of
from agentrl.core.records import EpisodeHeader, PolicyVersion, WeightsRef
from agentrl.credit.advantages import ADVANTAGES
from agentrl.orchestrator.buffer import EpisodeBuffer
from agentrl.orchestrator.signal import Signal

if TYPE_CHECKING:
    from agentrl.core.ports import ChatFormat, Engine
    from agentrl.environment.base import Environment
    from agentrl.journal.port import JournalStore
    from agentrl.orchestrator.dispatch import Dispatcher


GIVEN = -1
"""Lineage of weights that were given by hand; their step is taken from their digest. No run makes such versions, and no
others are called the same, so what was recorded with them is never taken for a run's."""


def weights_in(policy: str, directory: str | Path) -> WeightsRef:
    """The trained weights of a policy that lie in a directory, such as a run's `policies/NAME`.

    Raises:
        InputError: there are none.
    """
    directory = Path(directory).resolve()  # `policies/NAME` is a link, which will point elsewhere
    kinds: tuple[Literal["full", "adapter"], ...] = ("full", "adapter")
    for kind in kinds:
        files = [directory / name for name in WEIGHT_FILES[kind]]
        if files[0].is_file():
            try:
                digest = sha256_of(*files)
            except OSError as error:
                raise InputError(f"{error.filename}: cannot be read ({error.strerror})") from error
            version = PolicyVersion(policy, GIVEN, 1 + int(digest[:8], 16))
            return WeightsRef(version=version, path=str(directory), kind=kind, sha256=digest)
    names = " nor ".join(WEIGHT_FILES[kind][0] for kind in kinds)
    raise InputError(
        f"{directory}: no weights there (neither {names}); give a run's policies/NAME. Another base model is given by "
        "model.path"
    )


def with_weights(config: RunConfig, given: Sequence[WeightsRef]) -> RunConfig:
    """The configuration with an engine that can serve what is given, however the policies are trained.

    Raises:
        InputError: an adapter without its configuration.
    """
    policies = dict(config.policies)
    for weights in given:
        lora = None
        if weights.kind == "adapter":
            file = Path(weights.path) / "adapter_config.json"
            try:
                lora = LoraConfig(rank=json.loads(file.read_text(encoding="utf-8"))["r"])
            except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
                raise InputError(f"{file}: not the configuration of a LoRA adapter ({error!r})") from error
        name = weights.version.policy
        policies[name] = policies[name].model_copy(update={"lora": lora})
    engine = config.engine.model_copy(update={"refresh": "token"})  # any weights will do: none come while it runs
    return config.model_copy(update={"policies": policies, "engine": engine})


async def load_weights(config: RunConfig, engine: Engine, store: JournalStore, given: Sequence[WeightsRef]) -> None:
    """Give an engine the weights it is to serve in place of the base model's, and let the journal say where they lie.

    Raises:
        InputError: they do not fit the base model.
    """
    for weights in given:
        try:
            await engine.update(weights)
        except EngineError as error:
            raise InputError(f"{weights.path} does not fit {config.model.path}: {error}") from error
        store.record_version(weights, None)


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
