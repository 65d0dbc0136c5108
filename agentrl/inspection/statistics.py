"""A run as it is shown, read from its directory: by another process, while it is written, or afterwards.

The journal is the truth about episodes; `metrics.jsonl`, `status.json` and `alarms.jsonl` may be missing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from agentrl.core.errors import StorageError
from agentrl.observe.run_state import RunState, plan_of, read_metrics
from agentrl.observe.status import Status, read_status

if TYPE_CHECKING:
    from agentrl.inspection.reader import RunReader


def run_state(reader: RunReader) -> RunState:
    """All that the view and the report show of a run. What cannot be read is named in `problem`."""
    info = reader.info()
    config = info.get("config")
    plan = plan_of(config if isinstance(config, dict) else {"name": info.get("name", reader.path.name)})
    state = RunState(plan=plan, path=str(reader.path))
    read_metrics(reader.path / "metrics.jsonl", state)
    status = read_status(reader.path) or Status(phase="", ended=bool(state.policies))
    if not status.ended and reader.standing() == "killed":
        status = replace(status, ended=True, outcome="killed", waits=())
    try:
        counts = reader.counts()
        state.status = replace(
            status,
            in_flight=0 if status.ended else counts.get("in_flight", 0),
            ready=counts.get("ready", 0),
            trained=counts.get("trained", 0),
            dropped=reader.drop_reasons(),
        )
    except StorageError as error:
        state.status, state.problem = status, str(error)
    return state


def latest_metrics(state: RunState) -> dict[str, dict[str, float]]:
    """The newest value of each metric, by policy."""
    latest: dict[str, dict[str, float]] = {}
    for policy in state.policies.values():
        values: dict[str, float] = {}
        for known in (policy.evaluations, policy.steps):
            for _, at_step in sorted(known.items()):
                values.update(at_step)
        latest[policy.name] = {name: values[name] for name in sorted(values)} | {"step": float(policy.step)}
    return latest
