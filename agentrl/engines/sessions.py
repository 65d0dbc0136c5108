"""Sessions of an engine that computes in this process, and the versions they sample from.

Owns: what a conversation holds on to from `open` until it is closed and its last call has ended (a pin, a lease, a call
in flight), what each refresh means between two turns, and what any call must satisfy. Does not sample, does not know
weights, and does not interrupt calls: that is the engine's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np

from agentrl.core.errors import EngineError
from agentrl.core.records import Completion

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping

    from agentrl.core.ports import Delta, GenerateRequest, Refresh
    from agentrl.core.records import FinishReason, PolicyVersion
    from agentrl.engines.weights import Canary


@dataclass(slots=True, eq=False, kw_only=True)
class LiveVersion:
    """A version that can be sampled from, and who needs it."""

    version: PolicyVersion
    digest: str = ""
    canary: Canary | None = None
    """The answers that its trainer computed; tells it apart from other versions."""
    kept: int = 0
    """How often it was kept and not released."""
    pins: int = 0
    """Sessions opened on it."""
    leases: int = 0
    """Sessions that stay on it for now, by refresh `lazy` or `episode`."""
    calls: int = 0
    """Calls in flight that it samples."""

    @property
    def held(self) -> bool:
        """Whether something besides calls in flight needs it to stay as it is."""
        return self.kept > 0 or self.pins > 0 or self.leases > 0


LiveT = TypeVar("LiveT", bound=LiveVersion)


def canaries_of(live: Iterable[LiveVersion]) -> dict[str, Canary]:
    """The canaries of those that have one, by version."""
    return {str(each.version): each.canary for each in live if each.canary is not None}


def needs_adapters(refresh: Refresh | Mapping[str, Refresh]) -> Refresh | None:
    """The refresh, of all policies or of one, that several versions must be served side by side for; None: none is."""
    found = (refresh,) if isinstance(refresh, str) else refresh.values()
    return next((each for each in found if each in ("episode", "lazy")), None)


def newest_of(current: Mapping[str, LiveT], policy: str) -> LiveT:
    """A policy's newest version.

    Raises:
        EngineError: the engine does not serve the policy.
    """
    serving = current.get(policy)
    if serving is None:
        raise EngineError(f"no policy {policy!r} in this engine; it serves: {', '.join(sorted(current))}")
    return serving


def live_version(live: Mapping[PolicyVersion, LiveT], version: PolicyVersion) -> LiveT:
    """A live version.

    Raises:
        EngineError: the version is not (or no longer) here.
    """
    serving = live.get(version)
    if serving is None:
        names = ", ".join(sorted(map(str, live)))
        raise EngineError(
            f"version {version} is not served here (live: {names}); give it by update(..., keep=True) first"
        )
    return serving


class SessionOwner(Protocol):
    """The engine, as far as its sessions need it."""

    async def generate(self, session: Any, request: GenerateRequest, on_delta: Delta | None) -> Completion:
        """One call of `session`."""
        ...

    def abort(self, request_id: str) -> None:
        """End a call in flight."""
        ...

    def session_ended(self, session: Any) -> None:
        """`session` is closed and has no call in flight: give back whatever it holds."""
        ...


@dataclass(slots=True, eq=False)
class Session(Generic[LiveT]):
    """See `agentrl.core.ports.EngineSession`; made by an engine's `open`."""

    engine: SessionOwner
    session_id: str
    policy: str
    pin: LiveT | None
    lease: LiveT | None = None
    request: GenerateRequest | None = None
    """The request of the call in flight."""
    closed: bool = False

    def __post_init__(self) -> None:
        if self.pin is not None:
            self.pin.pins += 1

    @property
    def has_kv(self) -> bool:
        """Whether its keys and values are assumed to be cached still; vLLM does not report when it drops a prefix."""
        return True

    async def generate(self, request: GenerateRequest, on_delta: Delta | None = None) -> Completion:
        """See `agentrl.core.ports.EngineSession.generate`."""
        return await self.engine.generate(self, request, on_delta)

    def close(self) -> None:
        """See `agentrl.core.ports.EngineSession.close`."""
        if self.closed:
            return
        self.closed = True
        if self.request is None:
            self.engine.session_ended(self)
        else:
            self.engine.abort(self.request.request_id)

    def end_call(self) -> None:
        """Mark the call in flight as ended."""
        self.request = None
        if self.closed:
            self.engine.session_ended(self)


def check_request(
    request: GenerateRequest, session: Session[Any], in_flight: Container[str], *, vocabulary: int, where: str
) -> None:
    """Refuse a call that no engine takes; `in_flight` are the request ids of others, `where` names the call.

    Raises:
        EngineError: the session is closed or has a call, or the tokens or the temperature make no sense.
    """
    if session.closed:
        raise EngineError(f"{where}: the session is closed")
    if session.request is not None or request.request_id in in_flight:
        raise EngineError(f"{where}: a session has one call at a time, with a request id of its own")
    ids = request.token_ids
    if len(ids) == 0 or int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
        raise EngineError(f"{where}: the context must have tokens, all in [0, {vocabulary})")
    if not request.sampling.temperature > 0:
        raise EngineError(f"{where}: temperature {request.sampling.temperature} is not above 0")


def empty_completion(context: int, reason: FinishReason) -> Completion:
    """The reply to a call that sampled nothing."""
    return Completion(
        token_ids=np.zeros(0, np.int32),
        logprobs=np.zeros(0, np.float32),
        finish_reason=reason,
        spans=(),
        prompt_tokens=context,
    )


class Leases(Generic[LiveT]):
    """Leases of one engine's sessions.

    Args:
        refresh: when sessions move to newer weights: of all policies, or by policy.
        max_staleness: refresh `lazy`: how many steps a session of a policy may stay behind; 1 where absent.
        current: a policy's newest version.
        on_release: called with a version when a lease or a pin on it has ended.
    """

    def __init__(
        self,
        *,
        refresh: Refresh | Mapping[str, Refresh],
        max_staleness: Mapping[str, int],
        current: Callable[[str], LiveT],
        on_release: Callable[[LiveT], None],
    ) -> None:
        self._refresh = refresh
        self._max_staleness = max_staleness
        self._current = current
        self._on_release = on_release
        self._holders: set[Session[LiveT]] = set()

    def refresh_of(self, policy: str) -> Refresh:
        """When sessions of a policy move to newer weights."""
        return self._refresh if isinstance(self._refresh, str) else self._refresh[policy]

    def resolve(self, session: Session[LiveT]) -> LiveT:
        """The version that samples the next call of `session`, by its pin, its lease, or the refresh."""
        if session.pin is not None:
            return session.pin
        current, refresh = self._current(session.policy), self.refresh_of(session.policy)
        if refresh in ("token", "turn"):
            return current
        lease = session.lease
        if lease is not None and (refresh == "episode" or self._is_fresh(session, lease, current)):
            return lease
        self.end_lease(session)
        session.lease = current
        current.leases += 1
        self._holders.add(session)
        return current

    def _is_fresh(self, session: Session[LiveT], lease: LiveT, current: LiveT) -> bool:
        mine, newest = lease.version, current.version
        bound = self._max_staleness.get(session.policy, 1)
        return session.has_kv and mine.lineage == newest.lineage and newest.step - mine.step <= bound

    def end_lease(self, session: Session[LiveT]) -> None:
        """End the lease of a session, where it has one."""
        lease = session.lease
        if lease is not None:
            session.lease = None
            lease.leases -= 1
            self._holders.discard(session)
            self._on_release(lease)

    def close(self, session: Session[LiveT]) -> None:
        """The session is closed: it needs neither its lease nor its pinned version any more."""
        self.end_lease(session)
        pin = session.pin
        if pin is not None:
            session.pin = None
            pin.pins -= 1
            self._on_release(pin)

    def forget(self, version: LiveT) -> None:
        """End the leases of a version."""
        for session in [session for session in self._holders if session.lease is version]:
            self.end_lease(session)

    def revoke(self, live: list[LiveT]) -> bool:
        """Under `lazy`, end the leases of the oldest of these versions that only idle sessions hold on to."""
        idle = [
            version
            for version in live
            if version.leases
            and self.refresh_of(version.version.policy) == "lazy"
            and self._current(version.version.policy) is not version
            and not (version.kept or version.pins or version.calls)
        ]
        if not idle:
            return False
        oldest = min(idle, key=lambda version: (version.version.lineage, version.version.step))
        self.forget(oldest)
        return True
