"""Changes of a running run are recorded so that a resume takes them, and only its user may ask for them."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from agentrl.app.control import RunControl, serve_control
from agentrl.app.plan import resolve
from agentrl.app.resume import with_recorded_changes
from agentrl.config.load import SettingSources, load, setting_sources
from agentrl.config.run import RunConfig
from agentrl.core.clock import SystemClock
from agentrl.core.control_messages import (
    CONTROLS,
    MAX_ACTIONS,
    ControlRequest,
    read_actions,
    short_socket_path,
)
from agentrl.core.errors import InputError
from agentrl.core.records import WeightsRef
from agentrl.inspection.reader import RunReader
from agentrl.inspection.run_comparison import changed_settings
from agentrl.inspection.statistics import run_state
from agentrl.journal.port import VersionPublication
from agentrl.journal.run_log import RunStart, SettingChange
from agentrl.journal.store import SqliteJournal
from tests.journal_cases import step_of
from tests.sim.small_run import Guess, config_for


async def changed(
    path: Path, config: RunConfig, *settings: str, configured: dict[str, Any] | None = None, environment: Any = Guess
) -> dict[str, Any]:
    """Change settings of a run with a configuration; returns the run's info afterwards."""
    store = SqliteJournal(path)
    control = RunControl(
        *(resolve(config, environment), configured or config.model_dump(mode="json")),
        *(None, store),  # type: ignore[arg-type]  # no request here reaches the loop
        clock=SystemClock(),
        apply=lambda plan: None,
        tell=lambda line: None,
    )
    try:
        for setting in settings:
            await control.execute(ControlRequest("set", setting), "me")
        return dict(store.info())
    finally:
        await store.close()


@pytest.mark.parametrize("setting", ["steps=60", "evaluation.every=7"])
def test_only_the_changed_setting_counts_as_set_after_a_resume(tmp_path: Path, setting: str) -> None:
    config = config_for(policies={"guesser": {}})
    assert "learning_rate" not in config.trained["guesser"].model_fields_set
    resumed = with_recorded_changes(config, asyncio.run(changed(tmp_path, config, setting)), SettingSources())
    assert (resumed.steps, resumed.evaluation.every) in ((60, config.evaluation.every), (config.steps, 7))
    assert "learning_rate" not in resumed.trained["guesser"].model_fields_set


def test_an_entry_of_a_table_holds_after_a_resume(tmp_path: Path) -> None:
    config = config_for(steps={"guesser": 4})
    info = asyncio.run(changed(tmp_path, config, "steps.guesser=9"))
    assert with_recorded_changes(config, info, SettingSources()).steps == {"guesser": 9}
    assert with_recorded_changes(config, info, SettingSources(named={("steps", "guesser"): 4})).steps == {
        "guesser": 4
    }, "the caller named it"
    assert with_recorded_changes(config, info, SettingSources(named={("name",): "demo"})).steps == {"guesser": 9}


def test_fewer_steps_than_the_run_has_taken_are_refused(tmp_path: Path) -> None:
    async def taken() -> None:
        store = SqliteJournal(tmp_path)
        for number in range(1, 7):
            step = step_of("guesser", 0, number, [])
            weights = WeightsRef(version=step.version, path="", kind="full", sha256="0" * 64)
            store.record(step, VersionPublication(weights, step.report.started_from))
        await store.close()

    asyncio.run(taken())
    for setting in ("steps=2", "steps.guesser=5"):
        steps = 10 if setting.startswith("steps=") else {"guesser": 10}
        with pytest.raises(InputError, match=r"the run has taken 6 steps; set at least 6, or .*run drain"):
            asyncio.run(changed(tmp_path, config_for(steps=steps), setting))
    info = asyncio.run(changed(tmp_path, config_for(steps=10), "steps=6"))
    assert [action.now for action in read_actions(info)] == [6], "refused requests leave no record"


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("learning_rate=1e-4", r"learning_rate: there is no such setting. While the run runs, these may change: \w"),
        ("stpes=40", r"stpes: there is no such setting; did you mean steps\? While"),
        ("policies.guesser.learning_rate=0.1", r"learning_rate: cannot change while the run runs"),
    ],
)
def test_only_settings_that_may_change_are_suggested(tmp_path: Path, setting: str, words: str) -> None:
    with pytest.raises(InputError, match=words) as refused:
        asyncio.run(changed(tmp_path, config_for(steps=10), setting))
    assert "<name>" not in str(refused.value)


def test_a_change_holds_after_the_file_changed_in_between(tmp_path: Path) -> None:
    asyncio.run(changed(tmp_path, config_for(steps=40), "steps=60"))
    info = asyncio.run(changed(tmp_path, config_for(steps=50), "steps=70", "steps=80"))
    assert with_recorded_changes(config_for(steps=50), info, SettingSources()).steps == 80
    assert with_recorded_changes(config_for(steps=90), info, SettingSources()).steps == 90, "the file changed again"


def test_a_change_holds_where_the_first_start_named_the_setting(tmp_path: Path) -> None:
    file = tmp_path / "f.toml"
    text = "steps = 3\n[environment]\nid = 'unused'\n[model]\npath = 'unused'\n[policies.guesser]\n"
    file.write_text(text)
    first = setting_sources(file, ["--steps=40", "--name=k9"])
    assert dict(first.named) == {("steps",): 3}
    config = load(file, ["steps=40", "name=k9"])
    info = asyncio.run(changed(tmp_path / "journal", config, "steps=30", configured=first.configured(config)))

    def resumed(*overrides: str) -> Any:
        return with_recorded_changes(load(file, overrides), info, setting_sources(file, overrides)).steps

    assert resumed() == 30
    assert resumed("--seed=1") == 30
    assert resumed("--steps=50") == 50
    file.write_text(text.replace("3", "4"))
    assert resumed() == 4, "the file has changed since"


def test_the_screen_and_the_settings_show_a_change(tmp_path: Path) -> None:
    config = config_for(steps=4)
    plain = config.model_dump(mode="json")

    async def write() -> None:
        journal = SqliteJournal(tmp_path / "journal", info={"name": "demo", "config": plain})
        await journal.close()
        await changed(tmp_path / "journal", config, "steps=12", "max_in_flight=32")

    asyncio.run(write())
    with contextlib.closing(RunReader(tmp_path)) as reader:
        assert run_state(reader).plan.steps == 12
        settings = changed_settings(reader)
    assert (settings["steps"], settings["max_in_flight"]) == (12, 32)

    async def resume() -> None:
        """Resume with the caller's own number of steps."""
        journal = SqliteJournal(tmp_path / "journal")
        changes = (SettingChange(path=("steps",), before=4, now=6),)
        journal.record_start(RunStart(lineage=1, began_at=SystemClock().wall(), changed=changes))
        await journal.close()

    asyncio.run(resume())
    with contextlib.closing(RunReader(tmp_path)) as reader:
        assert run_state(reader).plan.steps == 6


def test_changes_stay_recorded_however_often_the_run_pauses(tmp_path: Path) -> None:
    config = config_for(steps=40)
    info = asyncio.run(changed(tmp_path, config, "steps=60"))
    pauses = [{"at": 1.0, "who": "me", "act": "pause"}] * (MAX_ACTIONS - 1)

    async def full() -> dict[str, Any]:
        store = SqliteJournal(tmp_path)
        await store.describe(**{CONTROLS: [*info[CONTROLS], *pauses]})
        await store.close()
        return await changed(tmp_path, config, "max_in_flight=32")

    info = asyncio.run(full())
    assert [action.act for action in read_actions(info)].count("set") == 2
    assert len(read_actions(info)) == MAX_ACTIONS
    assert with_recorded_changes(config, info, SettingSources()).steps == 60


def test_another_user_is_refused_even_if_that_is_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer() -> bytes:
        control = RunControl(
            *(resolve(config_for(), Guess), {}, None, None),  # type: ignore[arg-type]  # the request is refused before
            clock=SystemClock(),
            apply=lambda plan: None,
            tell=lambda line: None,
        )
        async with serve_control(tmp_path, control, pytest.fail):
            with short_socket_path(tmp_path) as path:
                reader, writer = await asyncio.open_unix_connection(path)
            writer.write(b'{"act": "pause"}\n')
            line = await reader.readline()
            writer.close()
        return line

    monkeypatch.setattr("agentrl.app.control.peer_of", lambda connection: (1, 0))
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    assert b"only the user of the run" in asyncio.run(answer())
