"""The versions that an engine should serve, those it can sample from, and the sessions that hold them.

`VersionRow` holds the versions that `Engine.serve` requested of an engine, and those it confirmed. The engines that
compute in this process use a `VersionTable`, whose subclasses load weights and move calls. A `VersionedSession` holds a
version from `open` until it is closed and its last call has ended: by a pin, a lease, or a call in flight.
`VersionTable.resolve` implements each refresh between two turns. `InProcessEngine` checks every call.
Invariants: a version that is current, pinned by the owner, or held by a session or a call is not forgotten; a version
id never serves two digests; a version that is no longer requested when its turn comes is not loaded.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Collection, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from agentrl.core.errors import (
    EngineError,
    EngineLostError,
    VersionNotServedError,
    VersionsRefusedError,
    version_refused_error,
)
from agentrl.core.tokens import Completion, Tokens
from agentrl.engines.kv_budget import KVBudget, Reservation, kv_budget_of

if TYPE_CHECKING:
    from collections.abc import Container

    from agentrl.core.ports import EngineCapabilities, GenerateRequest, NewTokensCallback, Refresh
    from agentrl.core.records import FinishReason, PolicyVersion, WeightsRef
    from agentrl.engines.canary import Canary, ObservedRounding


@dataclass(frozen=True, slots=True)
class VersionSet:
    """The versions that an engine should serve, or does serve."""

    current: Mapping[str, WeightsRef] = field(default_factory=dict)
    """Newest weights of each policy; a policy that is absent stays at its initial version."""
    pinned: frozenset[WeightsRef] = frozenset()

    def followed_by(self, current: Collection[WeightsRef], pinned: Collection[WeightsRef]) -> VersionSet:
        """Return the state after a further `Engine.serve`."""
        return VersionSet(
            {**self.current, **{weights.version.policy: weights for weights in current}}, frozenset(pinned)
        )

    def without_pins_but(self, request: VersionSet) -> VersionSet:
        """Return the same versions without pins that are not in `request`."""
        return VersionSet(self.current, self.pinned & request.pinned)

    def without(self, refused: Container[PolicyVersion], before: VersionSet) -> VersionSet:
        """Return the same versions without `refused` ones; their policies keep the current weights of `before`."""
        current = {
            policy: weights if weights.version not in refused else before.current.get(policy)
            for policy, weights in self.current.items()
        }
        return VersionSet(
            {policy: weights for policy, weights in current.items() if weights is not None},
            frozenset(weights for weights in self.pinned if weights.version not in refused),
        )

    @property
    def all(self) -> frozenset[WeightsRef]:
        """Return the current and the pinned versions."""
        return self.pinned | frozenset(self.current.values())

    def is_current(self, weights: WeightsRef) -> bool:
        """Whether these should be their policy's current weights."""
        return self.current.get(weights.version.policy) == weights

    def has_pin(self, version: PolicyVersion) -> bool:
        """Whether sessions may be pinned to the version although it is not current."""
        return any(weights.version == version for weights in self.pinned)


@dataclass(slots=True)
class VersionRow:
    """One row of the table of versions: those requested of an engine, and those it has confirmed.

    `router.Fleet` has a row per replica and one for all its replicas. `ProcessEngine` has the row that its next process
    starts from. A row's policies are the engine's.
    """

    requested: VersionSet = field(default_factory=VersionSet)
    """Newest request."""
    confirmed: VersionSet = field(default_factory=VersionSet)
    """The part of the requests that is served."""

    def request(self, current: Collection[WeightsRef], pinned: Collection[WeightsRef]) -> VersionSet:
        """Record a request, and return it. Versions that it unpins are no longer confirmed: a restarted engine does not
        load them."""
        self.requested = self.requested.followed_by(current, pinned)
        self.confirmed = self.confirmed.without_pins_but(self.requested)
        return self.requested

    def confirm(self, versions: VersionSet) -> None:
        """Record versions that are served, without pins released since the request."""
        self.confirmed = versions.without_pins_but(self.requested)

    def refuse(self, request: VersionSet, refused: Collection[PolicyVersion]) -> bool:
        """Withdraw refused versions from a request, unless a newer request decides. Returns whether it did."""
        if self.requested is not request:
            return False
        self.requested = request.without(refused, self.confirmed)
        return True

    def new(self) -> list[WeightsRef]:
        """Return the requested versions that are not confirmed, in loading order."""
        return in_loading_order(self.requested.all - self.confirmed.all, ())


def in_loading_order(current: Iterable[WeightsRef], pinned: Iterable[WeightsRef]) -> list[WeightsRef]:
    """Return versions in the order in which an engine loads them: older before newer ones of a policy."""
    return sorted({*current, *pinned}, key=lambda weights: weights.version)


@dataclass(slots=True, eq=False, kw_only=True)
class LiveVersion:
    """A version that can be sampled from, with counts of its holders."""

    version: PolicyVersion
    digest: str = ""
    """SHA-256 of the loaded weights. Empty: the version was only promised at the start, when the engine had loaded the
    base model; its weights are loaded when the first `serve` names them."""
    canary: Canary | None = None
    """Log-probabilities that its trainer computed; they distinguish it from other versions."""
    pinned: bool = False
    """Whether the engine's owner wants the version served although it may not be current."""
    pins: int = 0
    """Number of sessions pinned to the version."""
    leases: int = 0
    """Number of sessions that lease the version, by refresh `lazy` or `episode`."""
    calls: int = 0
    """Number of calls in flight that the version samples."""

    @property
    def held(self) -> bool:
        """Whether anything besides calls in flight holds the version."""
        return self.pinned or self.pins > 0 or self.leases > 0


LiveT = TypeVar("LiveT", bound=LiveVersion)


@dataclass(slots=True, eq=False)
class VersionedSession(Generic[LiveT]):
    """A conversation with an engine in this process. `open` of the engine makes it."""

    engine: InProcessEngine[LiveT]
    session_id: str
    policy: str
    pin: LiveT | None
    lease: LiveT | None = None
    request: GenerateRequest | None = None
    """Request of the call in flight."""
    row: int = 0
    """Row of the last call."""
    closed: bool = False
    reservation: Reservation = field(init=False)

    def __post_init__(self) -> None:
        self.reservation = self.engine.kv_budget.reservation((self.policy, self.pin))
        if self.pin is not None:
            self.pin.pins += 1

    @property
    def has_kv(self) -> bool:
        """Whether the session's KV is assumed to be cached; vLLM does not report dropped prefixes."""
        return True

    def generate(
        self, request: GenerateRequest, on_delta: NewTokensCallback | None = None
    ) -> Coroutine[Any, Any, Completion]:
        return self.reservation.sample(request, lambda: self.engine.generate(self, request, on_delta))

    async def wait_for_room(self) -> None:
        await self.reservation.wait()

    def hold(self, version: PolicyVersion) -> None:
        if not self.closed:
            pin = self.engine.versions.of_version(version)
            pin.pins += 1
            before, self.pin = self.pin, pin
            if before is not None:
                before.pins -= 1
                self.engine.versions.settle(before)

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.reservation.release()
        if self.request is None:
            self.engine.session_ended(self)
        else:
            self.engine.abort(self.request.request_id)

    def end_call(self) -> None:
        """Mark the call in flight as ended."""
        if self.request is not None:
            self.row, self.request = self.request.row, None
        if self.closed:
            self.engine.session_ended(self)


def policies_keeping_version(refresh: Refresh | Mapping[str, Refresh], policies: Iterable[str]) -> frozenset[str]:
    """Return the policies whose conversations stay on one version; see `EngineCapabilities.keeps_version`."""
    return frozenset(
        policy for policy in policies if (refresh if isinstance(refresh, str) else refresh[policy]) == "episode"
    )


def refresh_mode_needing_adapters(refresh: Refresh | Mapping[str, Refresh]) -> Refresh | None:
    """Return the refresh, of all policies or of one, that needs several versions served side by side; None if there is
    none."""
    modes = (refresh,) if isinstance(refresh, str) else refresh.values()
    return next((mode for mode in modes if mode in ("episode", "lazy")), None)


class VersionNotRequestedError(EngineError):
    """The owner dropped a version that was waiting to be loaded."""


class VersionTable(ABC, Generic[LiveT]):
    """The versions of an engine in this process. Subclasses load them.

    Args:
        refresh: when sessions move to newer weights: of all policies, or by policy.
        max_staleness: for refresh `lazy`, the number of steps that a session of a policy may stay behind; 1 if absent.
        places: number of adapters served side by side; 0: the engine serves full weights.
    """

    def __init__(self, *, refresh: Refresh | Mapping[str, Refresh], max_staleness: Mapping[str, int], places: int):
        self.places = places
        self.live: dict[PolicyVersion, LiveT] = {}
        """Versions that can be sampled from."""
        self.current: dict[str, LiveT] = {}
        """Newest version of each policy."""
        self._refresh = refresh
        self._max_staleness = max_staleness
        self._lease_holders: set[VersionedSession[LiveT]] = set()
        self.held: set[str] = set()
        """Policies whose new calls wait for an update."""
        self.rounding: dict[str, ObservedRounding] = {}
        """Rounding seen in the versions that passed the canary check, by policy."""
        self._requested = VersionSet()
        self._one_at_a_time = asyncio.Lock()
        self._changed = asyncio.Event()
        self._closed = False

    # --- lookup -------------------------------------------------------------------------------------------------------

    def of_policy(self, policy: str) -> LiveT:
        """Return a policy's current version.

        Raises:
            EngineError: the engine does not serve the policy.
        """
        serving = self.current.get(policy)
        if serving is None:
            raise EngineError(f"no policy {policy!r} in this engine; it serves: {', '.join(sorted(self.current))}")
        return serving

    def of_version(self, version: PolicyVersion) -> LiveT:
        """Return a live version.

        Raises:
            VersionNotServedError: the version is not, or no longer, served.
        """
        serving = self.live.get(version)
        if serving is None:
            names = ", ".join(sorted(map(str, self.live)))
            raise VersionNotServedError(
                f"version {version} is not served here (live: {names}); pin it by serve(..., pinned) first"
            )
        return serving

    def is_live(self, serving: LiveT) -> bool:
        """Whether a version can still be sampled from."""
        return self.live.get(serving.version) is serving

    def is_current(self, serving: LiveT) -> bool:
        """Whether a version is its policy's current one."""
        return self.current.get(serving.version.policy) is serving

    def canaries(self, but: LiveT, *also: LiveT) -> dict[PolicyVersion, Canary]:
        """Return the canaries of the versions that `but` could be mistaken for, by version."""
        rows = (*also, *self.live.values())
        return {row.version: row.canary for row in rows if row is not but and row.canary is not None}

    # --- leases -------------------------------------------------------------------------------------------------------

    def refresh_of(self, policy: str) -> Refresh:
        """Return when sessions of a policy move to newer weights."""
        return self._refresh if isinstance(self._refresh, str) else self._refresh[policy]

    def resolve(self, session: VersionedSession[LiveT]) -> LiveT:
        """Return the version for the next call of `session`, by its pin, its lease, or the refresh."""
        if session.pin is not None:
            return session.pin
        current, refresh = self.of_policy(session.policy), self.refresh_of(session.policy)
        if refresh in ("token", "turn"):
            return current
        lease = session.lease
        if lease is not None and (refresh == "episode" or self._is_fresh(session, lease, current)):
            return lease
        self.end_lease(session)
        session.lease = current
        current.leases += 1
        self._lease_holders.add(session)
        return current

    def _is_fresh(self, session: VersionedSession[LiveT], lease: LiveT, current: LiveT) -> bool:
        mine, newest = lease.version, current.version
        bound = self._max_staleness.get(session.policy, 1)
        return session.has_kv and mine.lineage == newest.lineage and newest.step - mine.step <= bound

    def end_lease(self, session: VersionedSession[LiveT]) -> None:
        """End the lease of a session, if it has one."""
        lease = session.lease
        if lease is not None:
            session.lease = None
            lease.leases -= 1
            self._lease_holders.discard(session)
            self.settle(lease)

    def release(self, session: VersionedSession[LiveT]) -> None:
        """Release the lease and the pin of a closed session."""
        self.end_lease(session)
        pin = session.pin
        if pin is not None:
            session.pin = None
            pin.pins -= 1
            self.settle(pin)

    def forget(self, version: LiveT) -> None:
        """End the leases of a version."""
        for session in [session for session in self._lease_holders if session.lease is version]:
            self.end_lease(session)

    def _revoke(self, live: Collection[LiveT]) -> bool:
        """End the leases of the oldest version that only idle sessions of a `lazy` policy hold. Returns whether there
        was one."""
        idle = [
            version
            for version in live
            if version.leases
            and self.refresh_of(version.version.policy) == "lazy"
            and self.of_policy(version.version.policy) is not version
            and not (version.pinned or version.pins or version.calls)
        ]
        if not idle:
            return False
        oldest = min(idle, key=lambda version: (version.version.lineage, version.version.step))
        self.forget(oldest)
        return True

    # --- reconciliation -----------------------------------------------------------------------------------------------

    async def serve(self, current: Collection[WeightsRef], pinned: Collection[WeightsRef]) -> None:
        """Serve these versions; failures are raised together, after the other versions are served."""
        for weights in (*current, *pinned):
            self.of_policy(weights.version.policy)
        self._requested = self._requested.followed_by(current, pinned)
        for serving in list(self.live.values()):
            serving.pinned = self._requested.has_pin(serving.version)
            self.settle(serving)
        refused: dict[PolicyVersion, EngineError] = {}
        async with self._one_at_a_time:
            for weights in in_loading_order(current, pinned):
                try:
                    await self._reconcile(weights)
                except VersionNotRequestedError:
                    continue
                except EngineLostError:
                    raise
                except EngineError as error:
                    refused[weights.version] = error
        if refused:
            raise VersionsRefusedError(refused=refused)

    async def _reconcile(self, weights: WeightsRef) -> None:
        self._check_requested(weights)
        serving = self.live.get(weights.version)
        if serving is None or not serving.digest:
            await self._load(weights)
        elif serving.digest != weights.sha256:
            raise version_refused_error(
                weights, "this version is already served with different weights; version ids are never reused"
            )
        elif self._requested.is_current(weights) and not self.is_current(serving):
            await self._make_current(serving)

    @abstractmethod
    async def _load(self, weights: WeightsRef) -> None:
        """Load a version that is not live, and make it current if it is requested as current.

        Raises:
            EngineError: the files do not match their digest or the model; nothing has changed.
        """

    @abstractmethod
    async def _make_current(self, serving: LiveT) -> None:
        """Make a live version current."""

    @abstractmethod
    def settle(self, serving: LiveT) -> None:
        """Forget a version without holders; called when a call, pin or lease of it has ended."""

    def _check_requested(self, weights: WeightsRef) -> None:
        if weights not in self._requested.all:
            raise VersionNotRequestedError(f"weights {weights.version} are no longer needed")

    async def _wait_for_adapter_slot(self, weights: WeightsRef, adapters: Collection[LiveT]) -> None:
        """Wait until one of the live `adapters`, which fill all slots, may be gone.

        Raises:
            VersionNotRequestedError: the owner dropped the version.
            EngineError: no slot will ever be free.
        """
        if self._revoke(adapters):
            return
        if all(serving.pinned or self.is_current(serving) for serving in adapters):
            names = ", ".join(sorted(str(serving.version) for serving in adapters))
            raise version_refused_error(
                weights, f"all {self.places} adapter slots are taken by {names}; unpin one, or raise adapter_slots"
            )
        await self._change()
        self._check_requested(weights)

    async def _change(self) -> None:
        self._check_open()  # the engine may have been closed while files were read
        self._changed.clear()
        await self._changed.wait()
        self._check_open()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine was closed before the update could be applied")

    def wake(self) -> None:
        """Wake updates that wait for a change."""
        self._changed.set()

    def close(self) -> None:
        """Fail the waiting updates: the engine has ended."""
        self._closed = True
        self._changed.set()


def empty_completion(reason: FinishReason) -> Completion:
    """Make the reply to a call that sampled nothing."""
    return Completion.of(Tokens.context(np.zeros(0, np.int32)), reason)


class InProcessEngine(ABC, Generic[LiveT]):
    """Base of the engines that compute in this process: opens sessions and checks calls."""

    capabilities: EngineCapabilities
    versions: VersionTable[LiveT]
    _vocabulary: int

    @cached_property
    def kv_budget(self) -> KVBudget:
        """The engine's KV-cache memory, of which each session holds its part."""
        return kv_budget_of(self.capabilities)

    def _resolve_pin(self, policy: str, pin: PolicyVersion | None) -> LiveT | None:
        """Return the version to which a session is pinned.

        Raises:
            EngineError: the policy or the version is not served here.
        """
        self.versions.of_policy(policy)
        return None if pin is None else self.versions.of_version(pin)

    @abstractmethod
    async def generate(self, session: Any, request: GenerateRequest, on_delta: NewTokensCallback | None) -> Completion:
        """Make one call of `session`."""

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """End a call in flight."""

    @abstractmethod
    def session_ended(self, session: Any) -> None:
        """Release the resources of a session that is closed and has no call in flight."""

    @abstractmethod
    def _check_running(self, operation: str) -> None:
        """Refuse work of an engine that has ended; `operation` names the work.

        Raises:
            EngineError: the engine has ended.
        """

    def _check_call(
        self, session: VersionedSession[LiveT], request: GenerateRequest, in_flight: Container[str]
    ) -> None:
        """Refuse an invalid call; `in_flight` holds the request ids of other calls.

        Raises:
            EngineError: the engine has ended, the session is closed or has a call, or the tokens or the temperature are
                invalid.
        """
        where = f"call {request.request_id} of session {session.session_id}"
        self._check_running(where)
        if session.closed:
            raise EngineError(f"{where}: the session is closed")
        if session.request is not None or request.request_id in in_flight:
            raise EngineError(f"{where}: a session allows one call at a time, each with a new request id")
        ids = request.token_ids
        if len(ids) == 0 or int(ids.min()) < 0 or int(ids.max()) >= self._vocabulary:
            raise EngineError(
                f"{where}: the context must not be empty, and its token ids must lie in [0, {self._vocabulary})"
            )
        if not request.sampling.temperature >= 0:
            raise EngineError(f"{where}: temperature {request.sampling.temperature} is below 0")

    def _samples_nothing(self, request: GenerateRequest) -> bool:
        """Whether a call ends before its first token, for lack of context or tokens."""
        return len(request.token_ids) >= self.capabilities.max_context or request.sampling.max_tokens < 1
