"""What `agentrl episode why` says of scheduling: what admission waited for, the order, who was released when."""

from __future__ import annotations

import asyncio
import contextlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.app.training import run_training
from agentrl.config.run import RunConfig
from agentrl.core.ids import root_episode_number
from agentrl.core.ports import Engine
from agentrl.environment.context import EpisodeContext, LimitReachedError
from agentrl.inspection.reader import RunReader
from agentrl.inspection.reasons import explain_episode
from agentrl.journal.entries import ExternalRequestParameters
from agentrl.journal.port import EpisodeEnd
from agentrl.journal.run_log import SqliteRunLog
from agentrl.journal.store import SqliteJournal
from tests.journal_cases import write_prompt, write_run
from tests.sim.small_run import config_for
from tests.support.builders import make_episode_header, make_spec
from tests.support.sample_environment import Propose, Solve
from tests.support.sample_run import sample_run_config, sample_run_factories


def told(reader: RunReader, episode_id: str, about: str) -> list[str]:
    return [reason.text for reason in explain_episode(reader, episode_id) if reason.about == about]


def trained_children(reader: RunReader) -> list[str]:
    return [line.episode for line in reader.episodes("environment ~ Solve and status = trained", limit=1000)]


def test_what_kept_a_root_waiting_and_for_which_step_it_was_started(sample_run: Path) -> None:
    reader = RunReader(sample_run)
    lines = reader.episodes("purpose = train and parent = null", limit=1000)
    roots = sorted((line.episode for line in lines), key=root_episode_number)[:32]
    waited = [text for name in roots for text in told(reader, name, "admitted") if "its start waited" in text]
    assert waited
    why = r"the trainer is \d steps? behind \(max_staleness of \w+\)|\d+ episodes are running \(max_in_flight\)"
    assert all(re.fullmatch(rf"its start waited [\d.e-]+ s because ({why})", text) for text in waited)
    steps = [int(told(reader, name, "order")[0].removeprefix("started for step ").split(";")[0]) for name in roots]
    assert steps == sorted(steps)
    assert (steps[0], steps[-1]) == (1, 8), "four roots bring a step"
    reader.close()


@pytest.mark.damages_journal
def test_the_setting_of_a_limit_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run"
    asyncio.run(write_run(path))
    for reason, setting, value in (
        ("context_length", "engine.max_context", 192),
        ("max_turns", "sampling.max_turns", 3),
        ("time_limit", "episode_timeout_s", 9.5),
    ):
        config = RunConfig(**config_for().model_dump() | {"episode_timeout_s": 9.5})
        data = config.model_dump(mode="json")
        data["engine"]["max_context"], data["sampling"]["max_turns"] = 192, 3

        async def end(reason: str = reason, data: dict[str, Any] = data) -> None:
            journal = SqliteJournal(path / "journal")
            await journal.describe(config=data)
            spec = make_spec(f"e{len(reason) + 100}")
            journal.admit(spec)
            ended = replace(make_episode_header(spec, reward=1.0), stop_reason=reason)
            await journal.commit(EpisodeEnd(spec, ended))
            await journal.close()

        asyncio.run(end())
        with contextlib.closing(RunReader(path)) as reader:
            reasons = explain_episode(reader, f"e{len(reason) + 100}")
        (ended,) = (each for each in reasons if each.about == "ended")
        assert ended.text.endswith(f"a limit cut it short ({setting} = {value})")
        assert ended.advice.startswith(f"raise {setting}, ")


OWN_LIMIT = ExternalRequestParameters(max_tokens=2, stop=())


@pytest.mark.parametrize(
    ("request_limit", "max_tokens", "told", "advice"),
    [
        (OWN_LIMIT, 64, "the request's own max_tokens = 2", "let the agent ask for more"),
        (None, 64, "the full context (engine.max_context = 192)", "raise engine.max_context"),
        (None, 2, "sampling.max_tokens = 2", "raise sampling.max_tokens to 16"),
    ],
)
def test_the_limit_that_cut_a_turn_is_named(
    tmp_path: Path, request_limit: ExternalRequestParameters | None, max_tokens: int, told: str, advice: str
) -> None:
    journal = SqliteJournal(tmp_path / "journal", info={"name": "cut", "config": {"engine": {"max_context": 192}}})
    asyncio.run(write_prompt(journal, b"\0" * 8, request=request_limit, finish_reason="length", max_tokens=max_tokens))
    with contextlib.closing(RunReader(tmp_path)) as reader:
        reasons = explain_episode(reader, "e0")
    (cut,) = (reason for reason in reasons if reason.text.startswith("cut at "))
    assert (cut.text, cut.advice) == (f"cut at {told}: turn 0 of solver[0]", advice)


def test_a_reply_that_a_stop_text_ended_was_not_cut(tmp_path: Path) -> None:
    request = ExternalRequestParameters(max_tokens=64, stop=("2",))
    journal = SqliteJournal(tmp_path / "journal", info={"name": "cut"})
    asyncio.run(write_prompt(journal, b"\0" * 8, request=request, finish_reason="length"))  # recorded without an end
    with contextlib.closing(RunReader(tmp_path)) as reader:
        assert not [reason for reason in explain_episode(reader, "e0") if reason.text.startswith("cut at ")]


class Refused(Propose):
    """Ends as if the endpoint of a remote policy had refused a turn."""

    solve = Solve  # children are looked up in this module

    async def run(self, ctx: EpisodeContext) -> None:
        await super().run(ctx)
        ctx.truncate(LimitReachedError("the endpoint refused the turn", stop_reason="refused"))


def test_a_refused_turn_is_no_limit(tmp_path: Path) -> None:
    config = RunConfig(**{**sample_run_config(tmp_path, "refused").model_dump(), "steps": 1})
    run = asyncio.run(run_training(config, Refused, quiet=True, factories=sample_run_factories()))
    reader = RunReader(run.path)
    [line, *_] = reader.episodes("stop_reason = refused", limit=1)
    (text,) = told(reader, line.episode, "ended")
    assert "the endpoint of a remote policy refused a turn" in text
    assert "limit" not in text
    reader.close()


def test_a_whole_group_is_released_with_its_last_member(sample_run: Path) -> None:
    reader = RunReader(sample_run)
    for name in trained_children(reader)[:20]:
        [text] = told(reader, name, "released")
        last = max(reader.group(reader.episode(name).summary.group), key=lambda line: line.committed_at or 0.0)
        assert text.startswith("when the last of its group")
        assert text.split(": ")[1].split(",")[0] == ("itself" if last.episode == name else last.episode)
    reader.close()


def test_early_and_late_members_are_told_apart(tmp_path: Path) -> None:
    values = sample_run_config(tmp_path, "late").model_dump()
    credit = {"group_size": 2, "release": "late"}
    config = RunConfig(**{**values, "steps": 4, "credit": credit, "trainer": {"loss": {"normalizer": 64}}})
    run = asyncio.run(run_training(config, Propose, quiet=True, factories=sample_run_factories()))
    reader = RunReader(run.path)
    log = SqliteRunLog(run.path / "journal")
    frozen = log.baselines()
    log.close()
    seen = set()
    for name in trained_children(reader):
        [text] = told(reader, name, "released")
        finishers = frozen[reader.episode(name).summary.group].finishers
        seen.add(text.split(",")[0])
        assert text.startswith("early, with the first 2 " if name in finishers else "late, when it ended")
        assert ", ".join(finishers) in text
        [compared] = [other for other in finishers if other != name][:1]
        assert f"compared with the rewards of {compared}" in text
    assert seen == {"early", "late"}
    reader.close()


def test_who_waited_for_room_in_the_engines_memory_is_told(tmp_path: Path) -> None:
    factories = sample_run_factories()

    async def short_of_memory(*arguments: Any) -> Engine:
        engine = await factories.engine(*arguments)
        engine.capabilities = replace(engine.capabilities, kv_tokens=400, prefill_rate=100_000.0)
        return engine

    config = RunConfig(**{**sample_run_config(tmp_path, "short").model_dump(), "steps": 2})
    run = asyncio.run(run_training(config, Propose, quiet=True, factories=replace(factories, engine=short_of_memory)))
    reader = RunReader(run.path)
    lines = reader.episodes("status = trained", limit=1000)
    waits = [text for line in lines for text in told(reader, line.episode, "time") if "room" in text]
    assert waits
    assert all(
        re.match(r"it waited [\d.]+ s for room in the engine's memory, in \d+ of its \d+ turns", text) for text in waits
    )
    assert reader.metric("no_room_s")["solver"]
    reader.close()


def test_an_evaluation_has_its_place_too(sample_run: Path) -> None:
    reader = RunReader(sample_run)
    [line] = reader.episodes("purpose = evaluate and parent = null", limit=1)
    assert told(reader, line.episode, "admitted") == ["an evaluation episode; it is never trained on"]
    assert told(reader, line.episode, "order")
    reader.close()
