"""`serve`: policies behind a model endpoint on this machine, without training; each conversation is an episode.

The endpoint is the gateway (`gateway/server.py`), with one key for all conversations. A conversation ends after
`IDLE_S` without a request, or when the server shuts down.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from agentrl.app.evaluation import Directory, play_in_new_run, prepare_evaluation
from agentrl.app.run_parts import environment_of
from agentrl.core.errors import EnvironmentDefinitionError, RunDirectoryError
from agentrl.core.records import EpisodeHeader, Task
from agentrl.environment.context import Endpoint, EpisodeContext
from agentrl.environment.environment import Environment
from agentrl.environment.harness import HarnessEnvironment
from agentrl.gateway.calls import RequestRefusedError
from agentrl.gateway.server import HOST, Gateway, SharedKeyConversations

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agentrl.config.run import RunConfig
    from agentrl.gateway.server import AttemptEndpoint
    from agentrl.orchestrator.dispatch import Dispatcher

IDLE_S = 600.0
"""Seconds without a request after which a conversation ends, bounded by `IDLE_SHARE`."""
IDLE_SHARE = 0.9
"""Largest share of `episode_timeout_s` that a conversation may be idle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointAddress:
    """Address and key of the served endpoint."""

    url: str
    """Base URL for clients of OpenAI's protocols; ends with `/v1`."""
    root_url: str
    """Base URL for clients of the Messages protocol."""
    key: str
    """API key; `KEY:NAME` continues the conversation of that name."""
    models: tuple[str, ...]


class EndpointConversation(Environment):
    """A conversation with clients of the endpoint."""

    server: ClassVar[_Server | None] = None
    agent: ClassVar[type[HarnessEnvironment]]
    """Class whose attributes determine how requests are compared, and which of their fields are ignored."""

    async def run(self, ctx: EpisodeContext) -> None:
        """Answer requests until the conversation ends."""
        server = self.server
        if server is None:
            raise EnvironmentDefinitionError(
                "a conversation of `agentrl serve` cannot be replayed: its requests came from a client"
            )
        agent = self.agent
        async with ctx.endpoint(
            aliases=agent.aliases, volatile=agent.volatile, ignored_fields=agent.ignored_fields
        ) as endpoint:
            held = server.hold(ctx.task, endpoint)
            _: str = await endpoint.run_program("conversation", lambda: held)


@dataclass(eq=False)
class _Server:
    """Starts an episode for each conversation."""

    models: tuple[str, ...]
    idle_s: float
    host: str
    port: int
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    conversations: SharedKeyConversations = field(init=False)
    gateway: Gateway = field(init=False)
    _dispatcher: Dispatcher | None = None
    _beginning: dict[str, asyncio.Future[AttemptEndpoint]] = field(default_factory=dict)
    """Conversations whose episode has not begun, keyed by task id."""
    _episodes: list[asyncio.Task[list[EpisodeHeader]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.conversations = SharedKeyConversations(self.models, self._begin)
        self.gateway = Gateway(host=self.host, port=self.port, conversations=self.conversations)

    async def play(self, dispatcher: Dispatcher, on_open: Callable[[EndpointAddress], None]) -> list[EpisodeHeader]:
        """Serve until `ended` is set."""
        self._dispatcher = dispatcher
        async with self.gateway.listen() as url:
            key = self.conversations.key
            on_open(EndpointAddress(url=url, root_url=url.removesuffix("/v1"), key=key, models=self.models))
            await self.ended.wait()
            ended = await asyncio.gather(*self._episodes)
        return [header for headers in ended for header in headers]

    async def hold(self, task: Task, endpoint: Endpoint) -> str:
        """Keep the seats of an episode open until its conversation ends; returns the reason."""
        opened = self.gateway.seats_of(endpoint.key)
        begun = self._beginning.pop(task.id, None)
        if begun is None:  # the engine was lost, and no client waits for the second attempt
            self.conversations.close(opened)
            return "its client was told that it failed"
        begun.set_result(opened)
        try:
            asked = -1
            while opened.requests != asked or opened.running:
                asked = opened.requests
                try:
                    await asyncio.wait_for(self.ended.wait(), self.idle_s)
                    return "the server ended"
                except TimeoutError:
                    pass
            return "nobody went on with it"
        finally:
            self.conversations.close(opened)

    async def _begin(self, name: str) -> AttemptEndpoint:
        if self.ended.is_set() or self._dispatcher is None:
            raise RequestRefusedError("the server is shutting down; start the conversation again later", "unavailable")
        loop = asyncio.get_running_loop()
        task = Task(id=f"{name or 'conversation'}-{len(self._episodes)}", data={"name": name} if name else {})
        begun: asyncio.Future[AttemptEndpoint] = loop.create_future()
        self._beginning[task.id] = begun
        playing = loop.create_task(self._dispatcher.evaluate([task], {}))
        self._episodes.append(playing)
        waited: set[asyncio.Future[Any]] = {begun, playing}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if not begun.done():
            raise RequestRefusedError("the conversation could not start; see the server's output", "unavailable")
        return begun.result()


async def serve(
    config: RunConfig,
    policy: Directory | Mapping[str, Directory] | None,
    run: Path,
    on_open: Callable[[EndpointAddress, Callable[[], None]], None],
    *,
    host: str = HOST,
    port: int = 0,
) -> list[EpisodeHeader]:
    """Serve the seats of a configuration's environment as models until told to end. Nothing is trained.

    Args:
        config: assigns policies to the seats.
        policy: weights of the policies; see `evaluate`.
        run: directory of the new run with the episodes.
        on_open: called when the endpoint listens, with a function that ends it.
        host: address to listen on.
        port: port to listen on; 0: any free port.

    Returns:
        One header per conversation.

    Raises:
        InputError: an argument cannot be used.
        StorageError: the address cannot be used.
    """
    if (run / "journal").exists():
        raise RunDirectoryError(f"{run} already contains a journal; give serve a new directory")
    config, given = prepare_evaluation(config, policy)
    environment = environment_of(config)
    agent = environment if issubclass(environment, HarnessEnvironment) else HarnessEnvironment
    models = (*environment.seats, *agent.aliases)
    server = _Server(models=models, idle_s=min(IDLE_S, IDLE_SHARE * config.episode_timeout_s), host=host, port=port)
    conversation = type(
        "EndpointConversation",
        (EndpointConversation,),
        {"__module__": __name__, "seats": environment.seats, "server": server, "agent": agent},
    )

    def play(dispatcher: Dispatcher) -> Coroutine[Any, Any, list[EpisodeHeader]]:
        return server.play(dispatcher, lambda address: on_open(address, server.ended.set))

    return await play_in_new_run(config, conversation, given, run, play, server.gateway)
