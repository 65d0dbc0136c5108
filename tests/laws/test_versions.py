"""The law of versions: a reply that names a version was sampled by exactly its weights, whatever happens meanwhile.

A scenario publishes, pins, unpins, leases and releases versions of tiny models, samples conversations from them, and
kills replicas, at random moments of each other. Some published versions are damaged, and must leave no trace. The whole
way is the real one: the run's table, its router, the clients of processes, their servers and embedded engines; only
the processes are tasks of this one, so that they start within milliseconds. The tokens of a reply are compared with a
plain forward pass of the weights that it names. At quiet moments each replica serves what the table says and nothing
else.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import os
import random
import socket
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from agentrl.core.clock import SystemClock
from agentrl.core.errors import EngineError, EngineLostError, EpisodeError, VersionNotServedError
from agentrl.core.records import PolicyVersion, WeightsRef
from agentrl.engines.embedded.batcher import Batcher
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.engines.embedded.forward import BASE, MergedModelCopy
from agentrl.engines.process import ChildProgram
from agentrl.engines.remote import engine_server
from agentrl.engines.remote.client import ProcessEngine
from agentrl.engines.router import EngineRouter
from agentrl.orchestrator.dispatch import ChangeCondition
from agentrl.orchestrator.tree_leases import TreeLeases
from agentrl.orchestrator.versions import ServedVersions
from tests.contract.engine_kinds import ModelZoo, canary_of, plain_logprobs, prompt, request, write_adapter, write_full
from tests.support.builders import make_spec

# A killed process does not close its connection.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
SEEDS = range(1000, 1000 + int(os.environ.get("AGENTRL_LAW_SEEDS", "8")))
KINDS = ("adapters", "adapters", "full", "merged")
STEPS = 45
PATIENCE_S = 20.0
TOLERANCE = 5e-4
"""Nats between the engine's log-probability and a plain pass; those of other weights differ by tenths."""


class Impatient(SystemClock):
    """Waits for nothing between two processes."""

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)


@dataclass(eq=False)
class TaskAsProcess:
    """A process of an engine that is a task of this one."""

    task: asyncio.Task[None]
    connection: socket.socket
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    host: str = ""
    process_id: int = 0
    is_drained: bool = False

    async def wait(self) -> str:
        await asyncio.wait({self.task})
        self.writer.close()
        return "died"

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


STARTED: dict[int, list[EmbeddedEngine]] = {}
"""The engines of each replica, the newest last."""


def load(*, replica: int, **options: Any) -> EmbeddedEngine:
    STARTED.setdefault(replica, []).append(EmbeddedEngine.load(**options))
    return STARTED[replica][-1]


class Placement:
    """Starts the processes of one replica."""

    gpus = ()

    async def start(self, program: ChildProgram) -> TaskAsProcess:
        ours, theirs = socket.socketpair()
        task = asyncio.get_running_loop().create_task(engine_server._serve(theirs))
        return TaskAsProcess(task, theirs, *await asyncio.open_connection(sock=ours))

    async def close(self) -> None:
        """Do nothing: the scenario closes the engines."""


@dataclass(eq=False)
class Conversation:
    """A session, and what its next call continues."""

    name: str
    policy: str
    session: Any
    pin: PolicyVersion | None
    opened_at: int
    """Number of killed processes when it was opened."""
    context: Any = None
    calls: int = 0
    version: PolicyVersion | None = None
    """Version of its last token."""
    running: bool = False


@dataclass(eq=False)
class World:
    """A random scenario."""

    seed: int
    zoo: ModelZoo
    directory: Path
    start_model: Any = field(init=False)
    rng: random.Random = field(init=False)
    kind: str = field(init=False)
    weights: dict[PolicyVersion, WeightsRef] = field(default_factory=dict)
    """Published versions that nothing damaged."""
    models: dict[PolicyVersion, Any] = field(default_factory=dict)
    publishing: dict[str, WeightsRef] = field(default_factory=dict)
    published: dict[str, list[PolicyVersion]] = field(default_factory=dict)
    """Versions of each policy that were current or about to be, in order."""
    holders: dict[str, WeightsRef] = field(default_factory=dict)
    pinned: set[str] = field(default_factory=set)
    """Holders whose pin was confirmed."""
    trees: dict[str, PolicyVersion] = field(default_factory=dict)
    conversations: list[Conversation] = field(default_factory=list)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    kills: int = 0
    settled_kills: int = 0
    names: int = 0
    checked: int = 0
    """Number of tokens that were compared."""

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.kind = self.rng.choice(KINDS)
        policies = ["solver"] if self.kind == "full" else ["solver", "proposer"]
        refreshes = ["token", "turn"] + ["episode", "lazy"] * (self.kind == "adapters")
        self.refresh = self.rng.choice(refreshes)
        self.first = {name: PolicyVersion(name, 0, 0) for name in policies}
        self.steps = dict.fromkeys(policies, 0)
        self.published = {name: [version] for name, version in self.first.items()}
        arguments: dict[str, Any] = {
            "model_path": str(self.zoo.directory()),
            "slots": self.rng.choice([2, 4]),
            "max_context": 192,
            "refresh": self.refresh,
            "adapter_slots": 6 if self.kind == "adapters" else 0,
            "merged": policies if self.kind == "merged" else [],
        }
        STARTED.clear()
        factory = f"{__name__}:{load.__name__}"
        self.replicas = [
            ProcessEngine(
                ChildProgram(factory, {**arguments, "replica": number}),
                self.first,
                placement=Placement(),
                attempts=1000,
                clock=Impatient(),
            )
            for number in range(self.rng.choice([1, 2]))
        ]
        self.start_model = self.zoo.load()
        self.models = dict.fromkeys(self.first.values(), self.start_model)

    async def start(self) -> None:
        for replica in self.replicas:
            await replica.ready()
        self.engine = EngineRouter(self.replicas)
        self.served = ServedVersions(self.engine)
        self.leases = TreeLeases(
            served=self.served,
            published=self.weights.get,
            limits=dict.fromkeys(self.first, 1),
            changed=ChangeCondition(),
        )

    # --- what happens -------------------------------------------------------------------------------------------------

    def publish(self) -> None:
        policy = self.rng.choice(list(self.steps))
        if policy in self.publishing:
            return
        self.steps[policy] += 1
        version = PolicyVersion(policy, 0, self.steps[policy])
        damage = self.rng.choice(["", "", "", "other canary", "torn", "gone"])
        weights, model = self._write(version, has_other_canary=damage == "other canary")
        file = next(Path(weights.path).glob("*.safetensors"))
        if damage == "torn":
            file.write_bytes(file.read_bytes()[:-1] + b"\1")
        elif damage == "gone":
            file.unlink()
        self.publishing[policy] = weights
        if not damage:
            self.weights[version], self.models[version] = weights, model
            self.published[policy].append(version)
        self._start(self._publish(weights, damage))

    async def _publish(self, weights: WeightsRef, damage: str) -> None:
        policy, before, kills = weights.version.policy, self.served.current.get(weights.version.policy), self.kills
        refusal = await _refusal(self.served.make_current(weights))
        if refusal is None:
            assert not damage, f"{weights.version} is served, although its files are damaged: {damage}"
        else:
            assert damage or self.kills - kills > 1, f"{weights.version} is refused: {refusal}"
            assert self.served.current.get(policy) == before
            if not damage:
                self.published[policy].remove(weights.version)
                del self.weights[weights.version]
        del self.publishing[policy]

    def _write(self, version: PolicyVersion, *, has_other_canary: bool) -> tuple[WeightsRef, Any]:
        directory, seed = self.directory / f"{version.policy}-{version.step}", self.rng.getrandbits(30)
        start, model, other = self.start_model, *(copy.deepcopy(self.start_model) for _ in range(2))
        generator = torch.Generator().manual_seed(seed)
        if self.kind == "full":
            tensors = load_file(self.zoo.directory() / "model.safetensors")
            tensors = {
                name: each + 0.1 * torch.randn(each.shape, generator=generator) for name, each in tensors.items()
            }
            model.load_state_dict(tensors, strict=False)
            model.tie_weights()
            other.load_state_dict({name: each + 0.5 for name, each in tensors.items()}, strict=False)
            canary = canary_of(other if has_other_canary else model, start)
            return write_full(directory, version, tensors, canary=canary), model
        write_adapter(directory, version, start, seed=seed)
        tensors = load_file(directory / "adapter_model.safetensors")
        for each, sign in ((model, 2.0), (other, -2.0)):  # alpha is twice the rank
            for name in {name.rpartition(".lora_")[0] for name in tensors}:
                layer = each.get_submodule(name.removeprefix("base_model.model."))
                down, up = (tensors[f"{name}.lora_{part}.weight"] for part in "AB")
                layer.weight.data += sign * up @ down
        metadata = canary_of(other if has_other_canary else model, start).metadata()
        directory = directory.with_name(f"{directory.name}-canary")
        return write_adapter(directory, version, start, seed=seed, metadata=metadata), model

    def pin(self) -> None:
        holder = f"holder {self.rng.randrange(2)}"
        if holder in self.holders or not self.weights:
            return
        self.holders[holder] = self.weights[self.rng.choice(sorted(self.weights))]
        self._start(self._pin(holder, self.holders[holder]))

    async def _pin(self, holder: str, weights: WeightsRef) -> None:
        kills = self.kills
        refusal = await _refusal(self.served.pin(holder, weights))
        if self.holders.get(holder) == weights:
            assert refusal is None or self.kills - kills > 1, f"{weights.version} is refused: {refusal}"
            (self.pinned.add if refusal is None else self.holders.pop)(holder)

    def unpin(self) -> None:
        if self.holders:
            holder = self.rng.choice(sorted(self.holders))
            self.pinned.discard(holder)
            self.served.unpin(holder, self.holders.pop(holder).version)

    def lease(self) -> None:
        current = [weights.version for weights in self.served.current.values()]
        if current and len(self.trees) < 2:
            self.names += 1
            self._start(self._lease(f"tree {self.names}", self.rng.choice(current)))

    async def _lease(self, name: str, version: PolicyVersion) -> None:
        self.trees[name] = version
        kills = self.kills
        self.leases.add(name, 0, f"{name} branch")
        try:
            await self.leases.acquire(make_spec(name), version)
        except EpisodeError:
            assert self.kills > kills
            self.trees.pop(name, None)

    def release(self) -> None:
        if self.trees:
            name = self.rng.choice(sorted(self.trees))
            del self.trees[name]
            for member in (name, f"{name} branch"):
                self.leases.member_ended(name, 0, member)

    def converse(self) -> None:
        idle = [each for each in self.conversations if not each.running]
        if len(self.conversations) < 5 and (not idle or self.rng.random() < 0.4):
            held = [self.holders[holder].version for holder in self.pinned]
            pin = self.rng.choice(sorted(held)) if held and self.rng.random() < 0.5 else None
            policy = pin.policy if pin else self.rng.choice(list(self.steps))
            self.names += 1
            try:
                session = self.engine.open(f"s{self.names}", policy, pin=pin)
            except EngineLostError:
                return
            context = prompt(self.rng.randint(4, 30), self.rng.choice([0, 1, self.names]))
            idle = [Conversation(f"s{self.names}", policy, session, pin, self.kills, context)]
            self.conversations += idle
        if idle:
            conversation = self.rng.choice(idle)
            conversation.running = True
            self._start(self._converse(conversation, self.rng.randint(1, 24)))

    async def _converse(self, each: Conversation, max_tokens: int) -> None:
        each.calls += 1
        kills, current = self.kills, self.served.current.get(each.policy)
        since = self.published[each.policy].index(current.version) if current else 0
        is_held = self._is_held(each.pin)
        try:
            completion = await each.session.generate(
                request(f"{each.name}.{each.calls}", each.context, seed=each.calls, max_tokens=max_tokens)
            )
        except VersionNotServedError:
            is_restarted = self.kills > each.opened_at
            if each.pin is None:
                assert is_restarted, "an open conversation lost its version"
                assert self.refresh == "episode"
            elif is_held:
                assert not self._is_held(each.pin), f"{each.pin} is pinned, but not served"
            self.close(each)
            return
        except EngineLostError:
            assert self.kills > min(kills, self.settled_kills), "no process was killed"
            each.running = False
            return
        assert [span.start for span in completion.spans] == [0, *(span.stop for span in completion.spans)][:-1]
        tokens = np.concatenate([each.context, completion.token_ids])
        for start, stop, version in completion.spans:
            self._check_tokens(version, tokens, len(each.context), start, completion.logprobs[start:stop])
            if each.pin is not None:
                assert version == each.pin
            elif self.refresh == "episode" and each.version is not None:
                assert version == each.version or self.kills > each.opened_at
            elif self.refresh != "episode":
                allowed = self.published[each.policy][max(since - (self.refresh == "lazy"), 0) :]
                assert version in allowed, f"{version} instead of one of {allowed}"
            each.version = version
        if self.refresh != "token" or each.pin is not None:
            assert len(completion.spans) == 1
        each.context, each.running = tokens, False
        if len(tokens) > 120:
            self.close(each)

    def _check_tokens(self, version: PolicyVersion, tokens: Any, context: int, start: int, logprobs: Any) -> None:
        assert version in self.models, f"{version} was never published, or is damaged"
        rows = plain_logprobs(self.models[version], tokens)[context + start - 1 :][: len(logprobs)]
        expected = np.take_along_axis(rows, tokens[context + start :][: len(logprobs), None].astype(np.int64), 1)[:, 0]
        assert np.abs(expected - logprobs).max() < TOLERANCE, f"other weights than {version} sampled the reply"
        self.checked += len(logprobs)

    def _is_held(self, version: PolicyVersion | None) -> bool:
        return any(self.holders[holder].version == version for holder in self.pinned)

    def end(self) -> None:
        idle = [each for each in self.conversations if not each.running]
        if idle:
            self.close(self.rng.choice(idle))

    def close(self, conversation: Conversation) -> None:
        conversation.session.close()
        self.conversations.remove(conversation)

    def kill(self) -> None:
        self.kills += 1
        self.rng.choice(self.replicas).supervisor.kill("by the scenario")

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.add(asyncio.get_running_loop().create_task(work))

    # --- what must hold -----------------------------------------------------------------------------------------------

    async def settle(self) -> None:
        """End all calls and conversations, and compare each replica with the table."""
        while self.tasks:
            for conversation in [each for each in self.conversations if not each.running]:
                self.close(conversation)
            if len(self.tasks) == 1 and self.trees:
                self.release()  # another tree may wait for its place
            ended, _ = await asyncio.wait(self.tasks, timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
            self.tasks -= ended
            for task in ended:
                task.result()
        for conversation in list(self.conversations):
            self.close(conversation)
        weights = [weights for each in self.served._pins.values() for weights in each.values()]
        await self.engine.serve([], weights)
        for replica in self.replicas:
            await replica.ready()
        (fleet,) = self.engine.fleets
        while not all(fleet.is_available(each) for each in fleet._replicas):
            await asyncio.sleep(0.01)
        self.settled_kills = self.kills
        for engines in STARTED.values():
            await self._check_replica(engines[-1])

    async def _check_replica(self, engine: EmbeddedEngine) -> None:
        for _ in range(200):  # messages of closed sessions are on their way
            if not any(each.pins or each.leases or each.calls for each in engine.versions.live.values()):
                break
            await asyncio.sleep(0.005)
        current = {name: self.served.current[name].version for name in self.served.current}
        assert {name: each.version for name, each in engine.versions.current.items()} == {**self.first, **current}
        held = {*(self.holders[holder].version for holder in self.pinned), *self.trees.values(), *current.values()}
        live = engine.versions.live
        on_base = {each for each in live if (live[each].model_copy, live[each].adapter) == (engine.versions.base, BASE)}
        assert held - on_base == live.keys() - on_base, f"live: {set(live)}; held: {held}"
        bank = engine.versions.base.bank
        loaded = {each.adapter for each in live.values() if each.adapter != BASE}
        assert set(bank._adapters if bank else ()) == loaded
        for version in held:
            name = f"check of {version}"
            session = engine.open(name, version.policy, pin=version)
            context = prompt(9, 1)
            completion = await session.generate(request(name, context))
            self._check_tokens(version, np.concatenate([context, completion.token_ids]), 9, 0, completion.logprobs)
            session.close()

    async def play(self) -> None:
        try:
            await self.start()
            async with asyncio.timeout(PATIENCE_S):
                await self._play()
        finally:
            for task in self.tasks:
                task.cancel()
            await self.engine.close()
            for engine in itertools.chain(*STARTED.values()):
                await engine.close()

    async def _play(self) -> None:
        acts: dict[Callable[[], None], int] = {
            self.publish: 4, self.pin: 3, self.unpin: 2, self.lease: 2, self.release: 2,
            self.converse: 12, self.end: 2, self.kill: 1,
        }  # fmt: skip
        for _ in range(STEPS):
            self.rng.choices(list(acts), list(acts.values()))[0]()
            await asyncio.sleep(self.rng.choice([0, 0, 0.001, 0.004, 0.02]))
            for task in [task for task in self.tasks if task.done()]:
                self.tasks.discard(task)
                task.result()
            if self.rng.random() < 0.06:
                await self.settle()
        await self.settle()


async def _refusal(request: Coroutine[Any, Any, None]) -> EngineError | None:
    try:
        await request
    except EngineError as error:
        return error
    return None


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> ModelZoo:
    torch.set_num_threads(1)
    return ModelZoo(tmp_path_factory.mktemp("models"))


def _play(seed: int, zoo: ModelZoo, directory: Path) -> None:
    async def main() -> None:
        await World(seed, zoo, directory / str(seed)).play()

    asyncio.run(main())


@pytest.mark.parametrize("seed", SEEDS)
def test_each_reply_is_sampled_by_the_weights_it_names(seed: int, zoo: ModelZoo, tmp_path: Path) -> None:
    _play(seed, zoo, tmp_path)


def _unpin_all(served: ServedVersions, holder: str, *versions: PolicyVersion) -> None:
    for each in (holder, *served._pins):
        UNPIN(served, each, *versions)


async def _restore_nothing(engine: ProcessEngine, connection: Any) -> None:
    """Leave the process at the versions with which it starts."""


UNPIN, SWITCH = ServedVersions.unpin, Batcher.switch
FAULTS: dict[str, tuple[str, type, str, Any]] = {
    "half-merged weights under an old number": ("merged", MergedModelCopy, "save", lambda copy: lambda: None),
    "a pin lost to an unpin": ("adapters", ServedVersions, "unpin", _unpin_all),
    "contexts of other weights": ("adapters", Batcher, "switch", lambda *call, keep_kv: SWITCH(*call, keep_kv=True)),
    "a restarted replica serves stale weights": ("adapters", ProcessEngine, "_restore", _restore_nothing),
    "a lease is never released": ("adapters", TreeLeases, "_release", lambda *_: None),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, zoo: ModelZoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, *patch = FAULTS[fault]
    monkeypatch.setattr(sys.modules[__name__], "KINDS", [kind])
    monkeypatch.setattr(*patch)
    for seed in range(1000, 1030):
        try:
            _play(seed, zoo, tmp_path)
        except (AssertionError, VersionNotServedError):
            return
    pytest.fail("no scenario found it")
