"""Every setting, changed between two starts of a run; and runs whose rows mix values, as older versions wrote them."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import shlex
import shutil
import sqlite3
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentrl.app.replays import replay
from agentrl.app.run_parts import RunFactories
from agentrl.cli.main import main
from agentrl.config.load import check_settings_unchanged
from agentrl.config.run import RunConfig
from agentrl.core.errors import ConfigError, InputError, StorageError
from agentrl.inspection.reader import RunReader
from agentrl.journal.control_rows import row_checksum
from agentrl.journal.entries import BeginEntry, JournalEntry, TurnEntry, encode_body, entry_checksum, episode_digest
from agentrl.journal.run_log import SqliteRunLog
from agentrl.observe.run_state import SILENT_S, read_run_snapshot, write_run_snapshot
from agentrl.rollout.chat.byte_formats import PlainChatFormat
from tests.architecture.test_configuration import leaves
from tests.support.resume_fields import (
    GROUP,
    NOT_RUN,
    TRAINED,
    Guess,
    Setting,
    base,
    judge,
    killed_run,
    play,
    play_file,
    resumed,
    settings,
    unclassified,
    wrong,
)
from tests.support.warm import call
from tests.unit.test_control import changed

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return killed_run(tmp_path_factory.mktemp("killed") / "run")


def test_every_setting_declares_what_a_resume_may_do_to_it() -> None:
    assert unclassified() == []
    assert len({each.key for each in settings()}) >= len(list(leaves(RunConfig))) - 2, "`kind` of a loss stands thrice"
    assert NOT_RUN.keys() < {each.key for each in settings()}


@pytest.mark.parametrize("setting", list(settings()), ids=lambda each: f"{each.key}-{each.section.__name__}")
def test_a_setting_is_changed_between_two_lives(setting: Setting, killed: Path, tmp_path: Path) -> None:
    assert wrong(setting, resumed(setting, killed, tmp_path, judge)) == []


def _within(data: dict[str, Any], setting: Setting) -> dict[str, Any] | None:
    """The section of a configuration that has a setting; None: none has."""
    section: Any = data
    *path, last = setting.key.split(".")
    for part in path:
        section = section.get(part) if isinstance(section, dict) else None
    return section if section is not None and last in section else None


DETERMINISTIC = RunConfig(
    environment={"id": "unused"},
    model={"path": "unused"},
    policies={"guesser": {"max_staleness": 1, "lora": {"rank": 4}}},
    deterministic=True,
)


def test_of_a_deterministic_run_less_may_differ() -> None:
    """`check_settings_unchanged` is asked: the run above cannot be deterministic, with policies of all kinds."""
    for setting in settings():
        before = DETERMINISTIC.model_dump(mode="json")
        if (section := _within(before, setting)) is None:
            continue
        *_, last = setting.key.split(".")
        section[last] = {"another": "value"} if isinstance(section[last], dict) else "another value"
        if setting.rule.allows(deterministic=True):
            assert [each.key for each in check_settings_unchanged(before, DETERMINISTIC)] == [setting.key]
        else:
            with pytest.raises(ConfigError, match=setting.key):
                check_settings_unchanged(before, DETERMINISTIC)


def test_an_unfinished_episode_keeps_its_temperature_and_a_new_one_takes_the_new(killed: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(killed, path, ignore=shutil.ignore_patterns("control.sock"))
    unfinished = [name for name in _episodes(path, "status = in_flight") if _temperatures(path, name)]
    assert unfinished, "none has begun; those that were only admitted begin under the new value"
    play(RunConfig(**base(path) | {"sampling": {"temperature": 0.5}, "steps": TRAINED + 3}), resume=True)
    assert {name: _temperatures(path, name) for name in unfinished} == {name: {1.0} for name in unfinished}
    new = [name for name in _episodes(path, "stop_reason != null") if _temperatures(path, name) == {0.5}]
    assert new
    assert not judge(path)


def test_rows_that_mix_temperatures_are_trained(killed: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(killed, path, ignore=shutil.ignore_patterns("control.sock"))
    mixed = [name for name in _episodes(path, "status = ready or status = trained") if _mix(path, name)]
    consumed = _consumed(path, through=2)
    waiting = set(mixed) - consumed
    assert waiting, "no committed episode waits for its step"
    run = play(RunConfig(**base(path)), resume=True)
    assert len(run.metrics) >= 2
    assert not judge(path)
    assert not _rows(path, "SELECT DISTINCT episode FROM unit_drops WHERE reason = 'untrainable'")
    assert waiting & (_consumed(path, through=TRAINED + 2) - consumed)


def _content(path: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file of a run; opening a database to read touches those of its shared memory."""
    files = [file for file in path.rglob("*") if file.is_file() and file.suffix not in (".db-shm", ".db-wal")]
    return {str(file.relative_to(path)): (file.stat().st_size, file.stat().st_mtime_ns) for file in files}


def test_a_resume_loses_no_step_and_a_finished_run_stays_as_it_is(
    killed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    shutil.copytree(killed, path, ignore=shutil.ignore_patterns("control.sock"))
    before = _content(path)
    message = "the run has taken 3 steps of guesser; steps is 2 in the configuration: add --steps=5 \\(what it ran with"
    with pytest.raises(InputError, match=message):
        play(RunConfig(**base(path) | {"steps": 2}), resume=True)
    assert _content(path) == before

    first = play(RunConfig(**base(path)), resume=True)
    assert first.metrics
    before = _content(path)
    capsys.readouterr()
    with pytest.raises(
        ConfigError, match="seed was 0 and is 9: a run is resumed with the settings it was started with"
    ):
        play(RunConfig(**base(path) | {"seed": 9}), resume=True)
    assert _content(path) == before, "a refused resume writes nothing, and the run stays finished"
    other = base(path)
    other["policies"]["guesser"]["step_size"] = 2 * GROUP
    again = play(RunConfig(**other), resume=True, quiet=False)
    said = capsys.readouterr().err
    assert said == f"the run has taken all {TRAINED} steps: nothing is left to do (--steps=M for more)\n"
    assert (again.policies, again.best, again.summary) == (first.policies, first.best, first.summary)
    assert not again.metrics
    assert _content(path) == before


def test_a_resume_shows_the_steps_that_were_set_while_the_run_ran(
    killed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    shutil.copytree(killed, path, ignore=shutil.ignore_patterns("control.sock"))
    config = RunConfig(**base(path))
    asyncio.run(changed(path / "journal", config, f"steps={TRAINED - 1}", environment=Guess))
    play(config, resume=True, quiet=False)
    said = capsys.readouterr().err
    assert f"Setting steps was {TRAINED} and is {TRAINED - 1}" in said
    assert f"step {TRAINED - 1}/{TRAINED - 1}" in said
    assert f"/{TRAINED} " not in said


def test_a_resume_says_what_it_does(killed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run"
    shutil.copytree(killed, path, ignore=shutil.ignore_patterns("control.sock"))
    status = read_run_snapshot(path)
    assert status is not None
    write_run_snapshot(path, dataclasses.replace(status, wall=status.wall - 2 * SILENT_S))  # else it may only be slow
    reader = RunReader(path)
    assert reader.standing() == "killed"
    reader.close()
    unfinished = len(_episodes(path, "status = in_flight"))
    play(RunConfig(**base(path) | {"sampling": {"temperature": 0.5}, "steps": TRAINED + 1}), resume=True, quiet=False)
    said = capsys.readouterr().err
    for words in (
        "Resuming from checkpoint step_000004-0 (steps taken: guesser 2, second 2).",
        "Step 3 of guesser will be taken again.",
        f"Unfinished episodes that will resume from the journal: {unfinished}.",
        "Setting sampling.temperature was 1.0 and is 0.5; unfinished episodes keep",
        "Setting steps was 5 and is 6.",
    ):
        assert words in said
    assert "code" not in said
    reader = RunReader(path)
    try:
        marks = {(point.policy, point.step): point.mark for point in reader.curve() if point.mark}
        assert reader.standing() == "finished"
        assert reader.log.config()["sampling"]["temperature"] == 0.5
    finally:
        reader.close()
    assert marks.keys() == {("guesser", 3), ("second", 3)}
    assert marks["guesser", 3] == ("resumed from step_000004-0; steps 5 → 6; sampling.temperature 1.0 → 0.5")


def test_a_resume_says_that_no_checkpoint_can_be_used_or_that_there_is_none(
    killed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run"
    shutil.copytree(killed, path, ignore=shutil.ignore_patterns("control.sock"))
    for manifest in (path / "checkpoints").glob("*/manifest.json"):
        manifest.write_text("{}")
    with pytest.raises(StorageError, match="step_000004-0"):
        play(RunConfig(**base(path)), resume=True)
    shutil.rmtree(path / "checkpoints")
    play(RunConfig(**base(path)), resume=True, quiet=False)
    said = capsys.readouterr().err
    assert "no checkpoint" in said
    assert "Steps 1 to 3 of guesser" in said
    assert not judge(path)


CODE = """
import agentrl

class Add(agentrl.Environment):
    seats = ("guesser",)

    @classmethod
    def tasks(cls, split, seed):
        return [agentrl.Task(id=f"t{n}", data={}) for n in range(64)]

    async def run(self, ctx):
        guesser = ctx.agent("guesser")
        turn = await guesser.act(agentrl.user("?"))
        guesser.reward(REWARD * float(turn.text[:1] in "02468"))
"""


def test_a_resume_after_the_reward_changed_counts_the_old_rewards_and_says_how_to_rescore(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two processes, since a file is imported once: the first leaves whole groups that are still to be trained."""
    file = tmp_path / "env.py"
    file.write_text(CODE.replace("REWARD", "1.0"))
    _life(tmp_path, "first")
    file.write_text(CODE.replace("REWARD", "2.0"))
    said = _life(tmp_path, "second")
    ready = re.search(r"(\d+) committed episodes? will be trained with rewards from the old code", said)
    assert ready is not None, said
    assert int(ready[1]) >= 1
    assert f"The code changed in {file}" in said
    command = re.search(r"`(agentrl episode rescore .*)`\.$", said, re.MULTILINE)
    assert command is not None
    arguments = shlex.split(command[1])
    assert arguments[-2:] == ["--environment", f"{file}:Add"]
    assert main(["run", "curve", str(tmp_path / "runs" / "run")]) == 0
    assert f"code changed: {file}" in " ".join(capsys.readouterr().out.split())


FUNCTIONS = """
import agentrl

@agentrl.loss
def tempered(batch):
    return -FACTOR * batch.ratio * batch.advantages

@agentrl.advantage
def centred(group):
    return [FACTOR * (reward - group.mean) for reward in group.rewards]

@agentrl.scorer
def constant(scored):
    return FACTOR
"""


@pytest.mark.parametrize("edited", [True, False])
def test_a_resume_in_another_directory_says_which_code_is_other_there(edited: bool, tmp_path: Path) -> None:
    said = ""
    for which, factor in (("first", "1.0"), ("second", "2.0" if edited else "1.0")):
        code = tmp_path / which
        code.mkdir()
        (code / "env.py").write_text(f"import words\n{CODE.replace('REWARD', factor)}")
        (code / "words.py").write_text(f"FACTOR = {factor}")
        (code / "mine.py").write_text(FUNCTIONS.replace("FACTOR", factor))
        said = _life(
            tmp_path,
            which,
            code=code,
            environment={"id": "env:Add"},
            credit={"advantage": f"{code / 'mine.py'}:centred"},
            trainer={"loss": {"name": "mine:tempered"}},
            scorers={"constant": {"function": f"{code / 'mine.py'}:constant"}},
        )
    assert ("loss tempered changed" in said) == edited
    assert ("advantage centred changed" in said) == edited
    env = tmp_path / "second" / "env.py"
    assert (f"The code changed in {env}" in said) == edited
    assert "mine.py; `on_code_change`" not in said, "only an environment has it"
    imported = re.search(r"code changed in ([^;]*), imported beside the environment's file", said)
    assert (imported is not None and str(tmp_path / "second" / "words.py") in imported[1]) == edited
    assert "esuming from checkpoint" in said or "no checkpoint yet" in said
    with closing(SqliteRunLog(tmp_path / "runs" / "run" / "journal")) as log:
        start = log.starts()[-1]
    # `mine:tempered` imports mine.py, from which the environment could import too
    of_rewards = {"env.py", "words.py", "mine.py", "mine.py:constant"} if edited else set()
    assert {Path(place).name for place in start.reward_code_changed} == of_rewards
    assert len(start.code_changed) == len(of_rewards) + 2 * edited, "a loss and an advantage"


OUTSIDE = """
import asyncio, pathlib

import agentrl
import prompts_of_add
from openai import AsyncOpenAI

class Add(agentrl.HarnessEnvironment):
    seats = ("guesser",)
    truncated_reward = 0.0

    @classmethod
    def tasks(cls, split, seed):
        return [agentrl.Task(id=f"t{n}", data={"number": n}) for n in range(64)]

    async def play(self, task, endpoint):
        async with AsyncOpenAI(base_url=endpoint.url, api_key=endpoint.key, max_retries=0) as client:
            for content in ("Begin.", prompts_of_add.SECOND):
                messages = [{"role": "user", "content": content}]
                reply = await client.chat.completions.create(model="guesser", messages=messages)
                while task.data["number"] % 2 and pathlib.Path("held").exists():
                    await asyncio.sleep(0.02)
        return reply.choices[0].message.content

    def reward(self, task, episode):
        return float(task.data["number"] % 4)
"""


def test_episodes_of_an_external_agent_start_over_after_a_module_changed(tmp_path: Path) -> None:
    pytest.importorskip("openai")
    (tmp_path / "env.py").write_text(OUTSIDE)
    (tmp_path / "prompts_of_add.py").write_text("SECOND = 'Add.'")
    (tmp_path / "held").touch()
    _life(tmp_path, "first")
    run = tmp_path / "runs" / "run"
    unfinished, ended = _episodes(run, "status = in_flight"), _episodes(run, "status = ready")
    assert unfinished
    assert ended
    (tmp_path / "held").unlink()
    (tmp_path / "prompts_of_add.py").write_text("SECOND = 'Sum.'")
    said = _life(tmp_path, "second")
    assert f"Unfinished episodes that will resume from the journal: {len(unfinished)}." in said
    changed_file = re.escape(str(tmp_path / "prompts_of_add.py"))
    assert re.search(
        rf"code changed in {changed_file}, imported beside the environment's file; "
        r"unfinished episodes start over, with the recorded replies to equal requests\.",
        said,
    ), said
    reader = RunReader(run)
    try:
        lines = [reader.episode(name).summary for name in unfinished]
    finally:
        reader.close()
    assert {(line.attempt, line.drop_reason) for line in lines} == {(1, None)}
    (result,) = replay(
        run,
        [(ended[0], None)],
        environment=f"{tmp_path / 'env.py'}:Add",
        factories=RunFactories(chat_format=lambda model: PlainChatFormat()),
    )
    assert result.outcome == "departed"
    assert "content: 'Add.', now 'Sum.'" in result.text
    assert result.advice == ("Changed since the episode was recorded: prompts_of_add.py, beside the environment's file")
    assert "ctx.rng" not in result.text


def _life(directory: Path, which: str, *, code: Path | None = None, **settings: Any) -> str:
    played = call(partial(play_file, directory, resume=which == "second", **settings), directory=code or directory)
    assert played.returncode == 0, played.stderr
    return played.stderr


def _episodes(path: Path, where: str) -> list[str]:
    reader = RunReader(path)
    try:
        return sorted(line.episode for line in reader.episodes(f"purpose = train and ({where})", limit=1000))
    finally:
        reader.close()


def _temperatures(path: Path, episode: str) -> set[float]:
    reader = RunReader(path)
    try:
        bodies = [body for _, body in reader.episode(episode).entries]
    finally:
        reader.close()
    turns = {body.temperature for body in bodies if isinstance(body, TurnEntry) and body.seat == "guesser"}
    begun = {body.settings[""].temperature for body in bodies if isinstance(body, BeginEntry)}
    return turns | begun


def _context_tokens(path: Path, episode: str) -> int:
    """Tokens of the longest row of an episode; 0 before its first turn."""
    reader = RunReader(path)
    try:
        turns = [body for _, body in reader.episode(episode).entries if isinstance(body, TurnEntry)]
    finally:
        reader.close()
    rows = {(turn.seat, turn.index, turn.row): 0 for turn in turns}
    for turn in turns:
        rows[turn.seat, turn.index, turn.row] += len(turn.context()) + len(turn.sampled())
    return max(rows.values(), default=0)


def _rows(path: Path, statement: str) -> list[str]:
    connection = sqlite3.connect(path / "journal" / "control.db")
    try:
        return [row[0] for row in connection.execute(statement)]
    finally:
        connection.close()


def _consumed(path: Path, *, through: int) -> set[str]:
    return set(_rows(path, f"SELECT episode FROM step_units WHERE step <= {through}"))


def _mix(path: Path, episode: str) -> bool:
    """Change the temperature of an episode's second turn, checksums included: what older versions wrote. False: it has
    no second turn."""
    turns = sqlite3.connect(path / "journal" / "turns-0.db")
    control = sqlite3.connect(path / "journal" / "control.db")
    try:
        changed = False
        entries = []
        for row in turns.execute("SELECT id, call, asked, body FROM entries WHERE episode = ? ORDER BY id", (episode,)):
            number, call, asked, body = row
            decoded = JournalEntry(episode, 0, call, asked, body).decode()
            if isinstance(decoded, TurnEntry) and decoded.seat == "guesser" and decoded.turn == 1:
                changed = True
                body = encode_body(msgspec.structs.replace(decoded, temperature=0.25))
                sum_ = entry_checksum(episode, 0, call, asked, body)
                turns.execute("UPDATE entries SET body = ?, checksum = ? WHERE id = ?", (body, sum_, number))
            entries.append(JournalEntry(episode, 0, call, asked, body))
        digest = episode_digest(entries)
        control.execute("UPDATE episodes SET digest = ? WHERE episode = ?", (digest, episode))
        (values,) = control.execute("SELECT * FROM episodes WHERE episode = ?", (episode,)).fetchall()
        checksum = row_checksum("episodes", values[:-1])
        control.execute("UPDATE episodes SET checksum = ? WHERE episode = ?", (checksum, episode))
        turns.commit()
        control.commit()
        return changed
    finally:
        turns.close()
        control.close()
