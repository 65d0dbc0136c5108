"""Records for a journal, and whole runs; shared by the tests of journal, inspection and command line."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from agentrl.core.records import (
    EpisodeDataLocation,
    EpisodeHeader,
    EpisodeSpec,
    PolicyVersion,
    SeatBinding,
    StepReport,
    Task,
    TrainBatch,
    TrajectoryCredit,
    TrajectoryHeader,
    Unit,
    VersionSpan,
    WeightsRef,
)
from agentrl.core.tokens import EncodedTokens
from agentrl.journal.entries import (
    BeginEntry,
    EntryBody,
    ExternalRequestParameters,
    JournalEntry,
    RewardEntry,
    SeatSettings,
    ToolEntry,
    TurnEntry,
    encode_body,
    episode_digest,
)
from agentrl.journal.port import EpisodeEnd, MetricRow, StepRow, VersionPublication
from agentrl.journal.store import SqliteJournal


def spec(number: int, *, attempt: int = 0, purpose: str = "train", parent: str | None = None) -> EpisodeSpec:
    return EpisodeSpec(
        episode_id=f"e{number}",
        environment="calculator",
        task=Task(id=f"t{number}", data={"question": "2 + 3", "nested": {"list": [1, 2.5, None]}}),
        seed=2**64 - 1 - number,
        seats={"solver": SeatBinding("policy"), "judge": SeatBinding("old", PolicyVersion("old", 0, 3))},
        group_id=f"g{number // 2}",
        group_size=2,
        attempt=attempt,
        purpose=purpose,  # type: ignore[arg-type]
        parent_id=parent,
    )


def header(of: EpisodeSpec, entries: int, *, reward: float = 1.0, dropped: str | None = None) -> EpisodeHeader:
    return EpisodeHeader(
        episode_id=of.episode_id,
        group_id=of.group_id,
        attempt=of.attempt,
        purpose=of.purpose,
        parent_id=of.parent_id,
        stop_reason=None if dropped else "completed",
        drop_reason=dropped,
        turns=2,
        tokens=7,
        seconds=0.25,
        trajectories=(
            TrajectoryHeader("solver", 0, "policy", reward, 5, 3, 0),
            TrajectoryHeader("judge", 0, "old", None, 2, 3, 0),
        ),
        location=EpisodeDataLocation("turns-w0.db", entries),
    )


def entry(of: EpisodeSpec, number: int, value: float = 0.5) -> JournalEntry:
    body = encode_body(RewardEntry("solver", 0, value, None))
    return JournalEntry(of.episode_id, of.attempt, f"r#{number}", b"12345678" if number % 2 else b"", body)


def step_of(
    policy: str,
    lineage: int,
    step: int,
    episodes: list[EpisodeSpec],
    *,
    rewards: bool = False,
    partition: str = "turns-w0.db",
) -> StepRow:
    """A step that consumed `episodes`; with `rewards`, each episode's is its number."""
    version = PolicyVersion(policy, lineage, step)
    units = tuple(
        Unit(
            episode_id=each.episode_id,
            attempt=each.attempt,
            policy=policy,
            location=EpisodeDataLocation(partition, 3),
            credits=(TrajectoryCredit("solver", 0, float(each.episode_id[1:]) if rewards else 1.0, 0.5, 0.5),),
        )
        for each in episodes
    )
    report = StepReport(
        step_id=step,
        policy=policy,
        started_from=PolicyVersion(policy, lineage, step - 1),
        loss=float("nan"),
        grad_norm=0.5,
        samples=len(units),
        tokens=10,
        seconds=0.1,
        metrics={"entropy": 1.5},
        input_digest="ab",
    )
    return StepRow(
        report=report, version=version, batch=TrainBatch(step_id=step, policy=policy, units=units, normalizer=8.0)
    )


def weights(policy: str, lineage: int, step: int) -> WeightsRef:
    return WeightsRef(version=PolicyVersion(policy, lineage, step), path="/tmp/w", kind="full", sha256="00")


async def write(journal: SqliteJournal, episodes: list[EpisodeSpec], entries: int = 3) -> None:
    log = journal.turn_log("w0")

    async def one(each: EpisodeSpec) -> None:
        journal.admit(each)
        written = [entry(each, number) for number in range(entries)]
        for item in written:
            log.append(item)
        await journal.commit(EpisodeEnd(each, header(each, entries), episode_digest(written), {"x": 1.0}))

    await asyncio.gather(*(one(each) for each in episodes))


async def one_episode(directory: Path) -> None:
    journal = SqliteJournal(directory)
    await write(journal, [spec(0)])
    await journal.close()


# --- a run to inspect -------------------------------------------------------------------------------------------------

HOSTILE = "a\x1b[31m[bold]red[/bold]\x07\x9b2J\u202etxt\u200b<script>\r'; DROP TABLE episodes; --"
"""Text that must not reach a terminal as it is."""


def entries_with(number: int, text: str) -> list[EntryBody]:
    """An episode of one turn, one tool call and a reward, with `text` in every field that holds content."""
    message: dict[str, object] = {"role": "user", "content": text}
    turn = TurnEntry(
        seat="solver",
        index=0,
        policy="policy",
        row=0,
        turn=0,
        context_ids=b"\0" * 8,
        tokens=EncodedTokens(b"\0" * 8, (VersionSpan(0, 2, PolicyVersion("policy", 0, 0)),), {"logprobs": b"\0" * 8}),
        finish_reason="stop",
        text=text,
        messages=(message,),
        temperature=1.0,
        seconds=0.1,
        started=1.0,
    )
    return [
        BeginEntry(text, "hash", text, {"q": text}, number, {"solver": "policy"}, "train", "g", 2, None),
        turn,
        ToolEntry(text, {text: text}, text, "ok", False, 0.01),
        RewardEntry("solver", 0, float(number), None),
    ]


async def write_run(directory: Path, *, text: str = "plain", name: str = "demo") -> None:
    """Episodes e0 to e5 (e5 dropped) with rewards 0 to 5, two steps that consumed e0 to e3, and e99 in flight."""
    journal = SqliteJournal(directory / "journal", info={"name": name})
    journal.record(VersionPublication(weights("policy", 0, 0), None))
    for number in range(6):
        await write_episode(journal, number, text)
    for step in (1, 2):
        row = step_of("policy", 0, step, [spec(2 * step - 2), spec(2 * step - 1)], rewards=True)
        journal.record(VersionPublication(weights("policy", 0, step), PolicyVersion("policy", 0, step - 1)))
        journal.record(row)
        journal.record(MetricRow("policy", step, {"loss": 0.1 * step, "grad_norm": float("nan")}))
    journal.admit(spec(99))
    begin = entries_with(99, text)[0]
    journal.turn_log("w0").append(JournalEntry("e99", 0, "begin", b"", encode_body(begin)))
    await journal.close()


async def write_episode(journal: SqliteJournal, number: int, text: str) -> None:
    log = journal.turn_log("w0")
    each = EpisodeSpec(
        episode_id=f"e{number}",
        environment=text,
        task=Task(id=f"{text}{number}", data={"q": text}),
        seed=number,
        seats={"solver": SeatBinding("policy")},
        group_id=f"g{number // 2}",
    )
    journal.admit(each)
    bodies = entries_with(number, text)
    for index, body in enumerate(bodies):
        log.append(JournalEntry(each.episode_id, 0, f"r#{index}", b"", encode_body(body)))
    dropped = number == 5
    trajectory = TrajectoryHeader("solver", 0, "policy", float(number), 2, 0, 0)
    ended = header(each, len(bodies), dropped=text if dropped else None)
    ended = replace(ended, turns=number, tokens=2, seconds=0.5, trajectories=(trajectory,))
    await journal.commit(EpisodeEnd(each, ended, b"", {"accuracy": 0.5}))


OFFERED = "add(a: integer) Add."
"""What the calculator's chat template says of the tool in `write_offers`."""


async def write_offers(directory: Path) -> None:
    """An episode whose prompt offers a tool and shows a worked example, in the words of the calculator's model."""
    from agentrl.core.records import Message, ToolCall, ToolSpec
    from agentrl.environments import calculator
    from agentrl.rollout.chat.chat_format import TemplateChatFormat
    from agentrl.rollout.turn_entries import encode_message

    model = Path(calculator.__file__).parent / "model"
    chat_format = TemplateChatFormat.load(model)
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    messages = [
        Message(role="user", content="What is 1 + 1?"),
        Message(role="assistant", content="", tool_calls=(ToolCall(id="c0", name="add", arguments={"a": 1}),)),
        Message(role="tool", content="2", tool_call_id="c0"),
        Message(role="assistant", content="2"),
        Message(role="user", content="What is 5 + 7?"),
    ]
    context = array("i", chat_format.start(messages, [ToolSpec(name="add", description="Add.", parameters=parameters)]))
    journal = SqliteJournal(directory / "journal", info={"name": "offers", "config": {"model": {"path": str(model)}}})
    await write_prompt(journal, context.tobytes(), tuple(map(encode_message, messages)))


async def write_prompt(
    journal: SqliteJournal,
    context: bytes,
    messages: tuple[dict[str, Any], ...] = (),
    request: ExternalRequestParameters | None = None,
    *,
    finish_reason: str = "stop",
    max_tokens: int = 64,
) -> None:
    """An episode e0 of two turns: the first has a prompt, the second drifts. Closes the journal."""
    begin, turn, _, reward = entries_with(0, "12")
    assert isinstance(turn, TurnEntry)
    assert isinstance(begin, BeginEntry)
    settings = SeatSettings(
        temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, max_tokens=max_tokens, max_turns=8, max_context=512
    )
    begin = msgspec.structs.replace(begin, settings={"solver": settings})
    first = msgspec.structs.replace(
        turn, context_ids=context, messages=messages, request=request, finish_reason=finish_reason
    )
    later = msgspec.structs.replace(turn, turn=1, parent_context=len(context) // 4 + 2, drift="retokenised")
    bodies = [begin, first, later, reward]
    log = journal.turn_log("w0")
    of = EpisodeSpec(
        episode_id="e0",
        environment="12",
        task=Task(id="12", data={"q": "12"}),
        seed=0,
        seats={"solver": SeatBinding("policy")},
        group_id="g0",
    )
    journal.admit(of)
    for index, body in enumerate(bodies):
        log.append(JournalEntry("e0", 0, f"r#{index}" if index else "begin", b"", encode_body(body)))
    ended = header(of, len(bodies), reward=0.0)
    trajectory = TrajectoryHeader("solver", 0, "policy", 0.0, 4, 0, 0)
    await journal.commit(EpisodeEnd(of, replace(ended, tokens=4, trajectories=(trajectory,))))
    await journal.close()


async def write_bargains(directory: Path, *, count: int = 6) -> None:
    """Episodes in which a policy trades with itself, and buyer and seller are rewarded: e0 with 0 and 0, e1 with 0.25
    and -0.25, and so on; in pairs. There are metrics of three steps."""
    config = {
        "environment": {"id": "shop:Bargain"},
        "model": {"path": "models/shop"},
        "policies": {"trader": {"kind": "trained", "step_size": 2, "max_staleness": 1}},
        "steps": 3,
    }
    journal = SqliteJournal(directory / "journal", info={"name": "bargains", "config": config})
    journal.record(VersionPublication(replace(weights("trader", 0, 0), sha256="0" * 64), None))
    for step in (1, 2, 3):
        rewards = {"reward/mean": 0.0, "reward/buyer": 0.25 * step, "reward/seller": -0.25 * step}
        held_out = {f"evaluation/{name.removesuffix('/mean')}": value for name, value in rewards.items()}
        own = {"agreed": 0.5, "evaluation/metric/agreed": 0.75, "evaluation/metric_error/agreed": 0.1}
        journal.record(MetricRow("trader", step, {**rewards, **held_out, **own, "entropy": 1.0 / step}))
    log = journal.turn_log("w0")
    for number in range(count):
        seats = dict.fromkeys(("buyer", "seller"), SeatBinding("trader"))
        task = Task(id=f"t{number // 2}", data={"item": "lamp", "limit": 10 + number // 2})
        of = EpisodeSpec(
            episode_id=f"e{number}",
            environment="shop:Bargain",
            task=task,
            seed=number,
            seats=seats,
            group_id=f"g{number // 2}",
            group_size=2,
        )
        journal.admit(of)
        reward = (number % 2) * 0.25 * (1 + number // 2)
        _, turn, _, _ = entries_with(number, f"I offer {number}.")
        assert isinstance(turn, TurnEntry)
        begin = BeginEntry(
            "shop:Bargain", "hash", task.id, task.data, number, dict.fromkeys(seats, ""), "train", "g", 2, None
        )
        bodies: list[EntryBody] = [begin]
        for seat, value in (("buyer", reward), ("seller", -reward)):
            bodies += [msgspec.structs.replace(turn, seat=seat, policy="trader"), RewardEntry(seat, 0, value, None)]
        for index, body in enumerate(bodies):
            log.append(JournalEntry(of.episode_id, 0, f"r#{index}" if index else "begin", b"", encode_body(body)))
        trajectories = (
            TrajectoryHeader("buyer", 0, "trader", reward, 2, 0, 0),
            TrajectoryHeader("seller", 0, "trader", -reward, 2, 0, 0),
        )
        ended = replace(header(of, len(bodies)), tokens=4, seconds=0.5, trajectories=trajectories)
        await journal.commit(EpisodeEnd(of, ended, b"", {"agreed": float(number % 2)}))
    await journal.close()


async def train_bargains(directory: Path) -> None:
    """Three steps over the episodes of `write_bargains`, two episodes each: the mean reward of the buyer is 0.125 times
    the number of the step."""
    journal = SqliteJournal(directory / "journal")
    for step in (1, 2, 3):
        row = step_of("trader", 0, step, [spec(2 * step - 2), spec(2 * step - 1)])
        units = []
        for number, unit in enumerate(row.batch.units):
            rewards = [(seat, sign * number * 0.25 * step, sign * 0.25 * step) for seat, sign in SIGNS]
            credits = (TrajectoryCredit(seat, 0, own, 2 * own - both, both - own) for seat, own, both in rewards)
            units.append(replace(unit, credits=tuple(credits)))
        published = replace(weights("trader", 0, step), sha256="0" * 64)
        journal.record(VersionPublication(published, PolicyVersion("trader", 0, step - 1)))
        journal.record(replace(row, batch=replace(row.batch, units=tuple(units))))
    await journal.close()


SIGNS = (("buyer", 1), ("seller", -1))
