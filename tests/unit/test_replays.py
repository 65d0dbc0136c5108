"""Recorded episodes executed again: identical, or departed at a named call; rewards given anew; edited forks."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import shutil
import sqlite3
import time
from pathlib import Path

import pytest

import agentrl
from agentrl.app import replays
from agentrl.app.forks import fork
from agentrl.app.received import ReceivedRun, refusal_on_resume, selected_by_tasks
from agentrl.app.replays import ReplayResult, replay, replay_step
from agentrl.cli.main import main
from agentrl.config.scorers import ScorerConfig
from agentrl.core.errors import InputError, JournalError
from agentrl.core.records import EpisodeSpec, PolicyVersion, Task
from agentrl.environment.registry import name_of
from agentrl.inspection.comparisons import fork_tree
from agentrl.inspection.conversation import PolicyTurn, RewardAct, read_conversation
from agentrl.inspection.reader import EpisodeLine, RunReader
from agentrl.inspection.steps import step_list
from agentrl.journal.run_log import RunStart, SettingChange
from agentrl.journal.store import SqliteJournal
from agentrl.rollout import runner
from tests.support import sample_environment
from tests.support.sample_run import play_with_script, sample_run_factories

SOURCE = Path(sample_environment.__file__).read_text(encoding="utf-8")


def episodes(run: Path, where: str = "") -> list[EpisodeLine]:
    reader = RunReader(run)
    try:
        return reader.episodes(where, sort="turns", limit=10_000)
    finally:
        reader.close()


def other(directory: Path, *changes: tuple[str, str]) -> str:
    """The sample's environments with changes, as a file; the reference of `Solve` in it."""
    source = SOURCE
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    path = directory / f"other_{len(list(directory.iterdir()))}.py"  # a name that was never imported before
    path.write_text(source, encoding="utf-8")
    return f"{path}:Solve"


def replayed(run: Path, line: EpisodeLine, **options: object) -> ReplayResult:
    (found,) = replay(run, [(line.episode, line.attempt)], factories=sample_run_factories(), **options)  # type: ignore[arg-type]
    return found


@pytest.fixture(autouse=True)
def commands_with_script(monkeypatch: pytest.MonkeyPatch) -> None:
    play_with_script(monkeypatch)


@pytest.fixture
def solved(sample_run: Path) -> EpisodeLine:
    """An attempt that the checker sent back once."""
    return episodes(sample_run, "environment ~ Solve and status = trained and reward < 1")[0]


def test_every_episode_of_the_sample_run_is_executed_again_identically(sample_run: Path) -> None:
    for run in (sample_run, sample_run / "forks"):
        lines = episodes(run)
        found = replay(run, [(line.episode, line.attempt) for line in lines], factories=sample_run_factories())
        assert [(each.episode, each.text) for each in found if each.outcome != "identical"] == []
        ended = {each.episode: each for each in found}
        assert all(ended[line.episode].calls == ended[line.episode].recorded for line in lines if line.stop_reason)


def test_episodes_are_executed_with_the_settings_of_the_start_in_which_they_ended(copied: Path) -> None:
    """A scorer that a later start of the run added makes no request."""
    scorer = ScorerConfig(function="elsewhere:brevity", per="turn").model_dump(mode="json")

    async def resume() -> None:
        log = SqliteJournal(copied / "journal")
        change = SettingChange(("scorers",), {}, {"brief": scorer})
        log.record_start(RunStart(lineage=9, began_at=time.time(), changed=(change,)))
        await log.close()

    asyncio.run(resume())
    lines = [line for line in episodes(copied) if line.stop_reason]
    found = replay(copied, [(line.episode, line.attempt) for line in lines], factories=sample_run_factories())
    assert {each.outcome for each in found} == {"identical"}


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (('"look up the archive"', '"look at the archive"'), "effect"),
        (
            ('user(f"{sum_text} = {answer}. Right or wrong?")', 'user(f"{sum_text} = {answer}. Right?")'),
            "turn of checker",
        ),
        (("return a + b", "return a + b + 1"), "tool"),
        (("REVISION = -0.1", "REVISION = -0.2"), "reward"),
    ],
)
def test_a_planted_difference_is_found_at_its_exact_call(
    sample_run: Path, solved: EpisodeLine, tmp_path: Path, change: tuple[str, str], kind: str
) -> None:
    before = replayed(sample_run, solved)
    expected = next(call for call, words in before.acts if kind in words and (kind != "reward" or "-0.1" in words))
    found = replayed(sample_run, solved, environment=other(tmp_path, change))
    assert (found.outcome, found.call) == ("departed", expected)
    place = [call for call, _ in before.acts].index(expected)
    assert found.acts[:place] == before.acts[:place]
    assert len(found.acts) <= place + 1, "a tool's observation is compared once the call has come back"
    assert "file has changed" in found.text


def test_nothing_is_performed(sample_run: Path, solved: EpisodeLine, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    touched = ('"""Return the archive', f'Path({str(canary)!r}).touch()\n    """Return the archive')
    further = (
        'ctx.metric("rounds"',
        f'await ctx.effect("further", lambda: Path({str(canary)!r}).touch())\n        ctx.metric("rounds"',
    )
    imported = ("import re\n", "import re\nfrom pathlib import Path\n")
    found = replayed(sample_run, solved, environment=other(tmp_path, touched, further, imported))
    assert found.outcome == "departed"
    assert found.calls == found.recorded, "all that was recorded came back first"
    assert "the code now makes" in found.text
    assert not canary.exists()


def test_an_execution_stops_where_it_is_told_to(sample_run: Path, solved: EpisodeLine) -> None:
    whole = replayed(sample_run, solved)
    found = replayed(sample_run, solved, until="r#3")
    assert (found.outcome, found.call) == ("stopped", "r#3")
    assert found.acts == whole.acts[: len(found.acts)]
    assert found.acts[-1][0] == "r#3"
    with pytest.raises(InputError, match="r#3000"):
        replayed(sample_run, solved, until="r#3000")


def test_rewards_are_given_anew_and_a_parent_hears_of_them(sample_run: Path, tmp_path: Path) -> None:
    reader = RunReader(sample_run)
    child = next(line for line in episodes(sample_run, "environment ~ Solve and status = trained and reward = 0.9"))
    parent = reader.episode(str(child.parent)).summary
    reader.close()
    reference = other(
        tmp_path,
        ("REVISION = -0.1", "REVISION = -0.75"),
        ("proposer.reward(4.0 * share * (1.0 - share))", "proposer.reward(sum(rewards))"),
    )
    found = replayed(sample_run, child, rescoring=True, environment=reference)
    assert found.outcome == "identical"
    assert found.before["solver[0]"] == pytest.approx(0.9)
    assert found.after["solver[0]"] == pytest.approx(0.25)
    above = replayed(sample_run, parent, rescoring=True, environment=reference.replace(":Solve", ":Propose"))
    siblings = [line for line in episodes(sample_run, "environment ~ Solve") if line.parent == parent.episode]
    revised = sum(line.reward not in (None, 1.0, 0.0) for line in siblings)
    known = [act for act in conversation_of(sample_run, parent.episode) if isinstance(act, RewardAct) and act.turn == 0]
    total = sum(line.reward or 0.0 for line in siblings) - 0.65 * revised + sum(act.value for act in known)
    assert above.after["proposer[0]"] == pytest.approx(total)
    same = replayed(sample_run, child, rescoring=True)
    assert same.before == same.after


def conversation_of(run: Path, episode: str) -> list[object]:
    reader = RunReader(run)
    try:
        return list(read_conversation(reader, episode).acts)
    finally:
        reader.close()


def test_code_that_only_the_journal_names_is_not_run(sample_run: Path, solved: EpisodeLine, tmp_path: Path) -> None:
    reference = other(tmp_path, ("import re\n", f"import re\nopen({str(tmp_path / 'ran')!r}, 'w').close()\n"))
    (tmp_path / "ran").unlink(missing_ok=True)
    for name in (
        reference,
        "os:system",
        "evil.py",
        "x" * 10_000,
        "json:JSONDecoder",
        "a b.py:C; rm -rf /",
        "m:f.<locals>.C",
    ):
        with pytest.raises(InputError, match="--environment"):
            ReceivedRun(tmp_path).environment(
                name, None, references={}, code_hash="", command="agentrl episode replay runs/r e1"
            )
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "recorded", "told"),
    [
        ("{file}:Solve", {}, r"run:\n  agentrl episode replay runs/r e1 --environment {file}:Solve$"),
        ("{edited}:Solve", {}, r"--environment {edited}:Solve\nIt was edited since, so the episode may depart\.$"),
        (
            "{file}.moved.py:Solve",
            {},
            r"no longer exists. Give its new location:\n.* --environment NEW/other_1\.py\.moved\.py:Solve$",
        ),
        ("__main__:Solve", {"__main__:Solve": "{file}:Solve"}, r"--environment {file}:Solve\nFirst guard .*__main__"),
        ("__main__:Child", {"__main__:Solve": "{file}:Solve"}, r"--environment {file}:Child"),
        ("__main__:Solve", {}, r"typed into a notebook. Name its file:\n.*--environment path/to/env\.py:Class$"),
        ("my_own", {"my_own": "{file}:Solve"}, r"run:\n.*--environment {file}:Solve"),
        ("my_own", {}, r"registered under that name by .*\n.*--environment path/to/env\.py:Class$"),
        ("my_module:Solve", {}, r"PYTHONPATH\), run:\n.*--environment my_module:Solve$"),
        ("m:make.<locals>.Solve", {}, r"inside a function: move it to the top level"),
        ("/x y/$(a).py:C", {"/x y/$(a).py:C": "{file}:C; touch x"}, r"--environment '{file}:C; touch x'"),
    ],
)
def test_a_refusal_has_the_command_that_names_the_code(
    tmp_path: Path, name: str, recorded: dict[str, str], told: str
) -> None:
    places = {"edited": other(tmp_path, ("import re\n", "import re\n\n")).rpartition(":")[0]}
    file = places["file"] = other(tmp_path).rpartition(":")[0]
    digest = hashlib.blake2b(Path(file).read_bytes(), digest_size=8).hexdigest()
    shown = {key: re.escape(value) for key, value in places.items()}
    with pytest.raises(InputError) as refused:
        ReceivedRun(tmp_path).environment(
            name.format(**places),
            None,
            references={key: value.format(**places) for key, value in recorded.items()},
            code_hash=digest,
            command="agentrl episode replay runs/r e1",
        )
    assert re.search(told.format(**shown), str(refused.value)), str(refused.value)


# --- forks ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def copied(sample_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sample_run, tmp_path / "copied", symlinks=True))


def test_an_episode_of_a_version_that_compared_less_is_not_replayable(
    sample_run: Path, solved: EpisodeLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "REQUEST_VERSION", runner.REQUEST_VERSION + 1)
    found = replayed(sample_run, solved)
    assert found.outcome == "not_replayable"
    assert "another version of agentrl" in found.text


def test_an_edited_fork_is_told_something_else_also_when_executed_again(copied: Path, solved: EpisodeLine) -> None:
    (edited,) = fork(copied, solved.episode, at=0, edit="2 + 2 =", factories=sample_run_factories())
    (again,) = fork(copied / "forks", edited.episode_id, at=-1, factories=sample_run_factories())
    for name in (edited.episode_id, again.episode_id):
        turns = [act for act in conversation_of(copied / "forks", name) if isinstance(act, PolicyTurn)]
        assert turns[0].messages == [{"role": "user", "content": "2 + 2 ="}]
        found = replay(copied / "forks", [(name, None)], factories=sample_run_factories())
        assert [each.outcome for each in found] == ["identical"]
    reader = RunReader(copied)
    tree = {entry.line.episode: entry for entry in fork_tree(reader)}
    reader.close()
    assert (tree[edited.episode_id].is_edited, tree[again.episode_id].is_edited) == (True, False)
    assert tree[again.episode_id].depth == 2


def test_a_policy_that_the_run_does_not_have_is_named(copied: Path, solved: EpisodeLine) -> None:
    for asked in ("nobody@0.1", "checker=nobody@0.1"):
        with pytest.raises(InputError, match="--policy"):
            fork(copied, solved.episode, at=0, policy=asked, factories=sample_run_factories())
    with pytest.raises(InputError, match="'nobody'"):
        fork(copied, solved.episode, at=0, policy="nobody=solver", factories=sample_run_factories())
    with sqlite3.connect(copied / "journal" / "control.db") as database:
        ((config,),) = database.execute("SELECT value FROM meta WHERE key = 'info'")
        database.execute("UPDATE meta SET value = ? WHERE key = 'info'", (config.replace('"checker"', '"judge"'),))
    database.close()
    with pytest.raises(InputError, match="'checker'"):
        fork(copied, solved.episode, at=0, factories=sample_run_factories())


def test_a_fork_is_named_in_the_run_it_belongs_to(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["show"], ["tokens"], ["why"], ["replay", "--step"], ["rescore"]):
        shown = []
        for run, name in ((copied, "forks/f0"), (copied / "forks", "f0")):
            assert main(["episode", *command, str(run), name]) == 0
            shown.append(capsys.readouterr().out)
        assert "f0" in shown[0]
        assert shown[0] == shown[1]
    assert main(["episode", "fork", str(copied), "forks/f0", "--at", "-1", "--json"]) == 0
    (made,) = json.loads(capsys.readouterr().out)
    reader = RunReader(copied)
    assert made["episode"] in {entry.line.episode: entry.depth for entry in fork_tree(reader) if entry.depth == 2}
    reader.close()
    assert main(["episode", "show", str(copied), "forks/f99"]) == 2
    assert f"{copied / 'forks'}: no episode 'f99'" in capsys.readouterr().err


def turns_of(run: Path, episode: str) -> list[PolicyTurn]:
    return [act for act in conversation_of(run, episode) if isinstance(act, PolicyTurn)]


def test_a_fork_is_played_by_whom_it_is_asked_for(copied: Path, solved: EpisodeLine) -> None:
    run, name = copied / "forks", solved.episode
    (older,) = fork(copied, name, at=0, policy="solver@0.0", factories=sample_run_factories())
    assert {act.versions[0][1] for act in turns_of(run, older.episode_id) if act.seat == "solver"} == {"solver@0.0"}
    (moved,) = fork(copied, name, at=0, policy=["checker=solver@1.8"], factories=sample_run_factories())
    own = turns_of(run, moved.episode_id)
    assert {act.policy for act in own} == {"solver"}
    assert {act.versions[0][1] for act in own} == {"solver@1.8"}, "a policy has the same weights in all its seats"
    (again,) = fork(run, moved.episode_id, at=-1, factories=sample_run_factories())
    assert turns_of(run, again.episode_id)[-1].versions == [(0, "solver@1.8")], "a fork of it is played likewise"
    for fork_id in (older.episode_id, moved.episode_id, again.episode_id):
        assert [each.outcome for each in replay(run, [(fork_id, None)], factories=sample_run_factories())] == [
            "identical"
        ]
    reader = RunReader(copied)
    tree = {entry.line.episode: entry.version for entry in fork_tree(reader)}
    reader.close()
    assert (tree[older.episode_id], tree[moved.episode_id]) == ("solver@0.0", "solver@1.8")


def test_who_has_not_acted_yet_plays_with_the_weights_of_that_time(copied: Path) -> None:
    parent = next(line for line in episodes(copied, "environment ~ Propose and oldest_step > 1 and purpose = train"))
    began = turns_of(copied, parent.episode)[0]
    reader = RunReader(copied)
    at = read_conversation(reader, parent.episode).began
    (newest,) = reader.log.rows(
        "SELECT lineage, step FROM versions WHERE policy = 'solver' AND published_at <= ?"
        " ORDER BY published_at DESC LIMIT 1",
        at,
    )
    reader.close()
    made = fork(copied, parent.episode, at=0, n=3, policy="proposer@0.0", factories=sample_run_factories())
    for each in made:
        assert turns_of(copied / "forks", each.episode_id)[0].versions == [(0, "proposer@0.0")] != began.versions
    children = [line for line in episodes(copied / "forks", "parent != null") if line.turns]
    solvers = {turn.versions[0][1] for line in children for turn in turns_of(copied / "forks", line.episode)}
    assert solvers == {"solver@{}.{}".format(*newest), "checker@0.0"}, "the solver's weights when it was proposed"


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("judge=solver", "seat 'judge'"),
        ("juhu@0.1", "'juhu'"),
        ("solver@0.99", "solver@0.99"),
        ("checker=solver@7.7", "solver@7.7"),
        ("nowhere", "there is no such directory"),
    ],
)
def test_players_there_are_not_are_refused(sample_run: Path, solved: EpisodeLine, asked: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        fork(sample_run, solved.episode, at=0, policy=asked, factories=sample_run_factories())


def test_the_commands_play_and_compare(
    copied: Path, solved: EpisodeLine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(copied)
    assert main(["episode", "replay", run, solved.episode, "--step"]) == 0
    assert "identical" in capsys.readouterr().out
    assert main(["episode", "replay", run, "--where", "turns > 5 and status = trained", "--json"]) == 0
    printed = capsys.readouterr()
    assert {each["outcome"] for each in json.loads(printed.out)} == {"identical"}
    assert f"replaying: 0 of {len(json.loads(printed.out))} episodes …" in printed.err
    changed = other(tmp_path, ("return a + b", "return a - b"))
    assert main(["episode", "replay", run, solved.episode, "--environment", changed]) == 1
    assert "departed" in capsys.readouterr().out
    changed = other(tmp_path, ("REVISION = -0.1", "REVISION = -0.5"))
    assert main(["episode", "rescore", run, solved.episode, "--environment", changed]) == 0
    assert "now" in capsys.readouterr().out
    (tmp_path / "told.json").write_text('[{"role": "user", "content": "9 + 9 ="}]')
    edit = ["--at", "0", "-n", "2", "--edit", str(tmp_path / "told.json")]
    assert main(["episode", "fork", run, solved.episode, *edit]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("finished") == 2
    assert "forking: loading the model …" in printed.err
    assert main(["step", "replay", run, "--json"]) == 0
    printed = capsys.readouterr()
    assert f"replaying: 0 of {len(json.loads(printed.out))} steps …" in printed.err


def test_a_fork_and_a_replay_report_their_progress(copied: Path, solved: EpisodeLine) -> None:
    parts: list[tuple[str, float]] = []
    factories = sample_run_factories()
    fork(copied, solved.episode, at=0, n=3, factories=factories, on_progress=lambda *part: parts.append(part))
    assert parts[0] == ("loading the model", 0.0)
    last, share = parts[-1]
    assert share == 1.0
    number = re.fullmatch(r"3 of 3 forks ended, ([\d,]+) calls recorded", last)
    assert number is not None, last
    assert int(number[1].replace(",", "")) > 3
    parts.clear()
    episodes = [(solved.episode, None)] * 2
    replay(copied, episodes, factories=factories, on_progress=lambda *part: parts.append(part))
    assert parts == [("0 of 2 episodes", 0.0), ("1 of 2 episodes", 0.5)]


@pytest.mark.parametrize("text", ["{", "[]", "[7]", '[{"role": "nobody", "content": "x"}]', '[{"content": "x"}]'])
def test_an_edit_that_is_no_message_is_refused(
    sample_run: Path, solved: EpisodeLine, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (tmp_path / "told.json").write_text(text)
    edit = ["--at", "0", "--edit", str(tmp_path / "told.json")]
    assert main(["episode", "fork", str(sample_run), solved.episode, *edit]) == 2
    _, *errors = capsys.readouterr().err.splitlines()  # the first line is the phase
    assert len(errors) == 1


# --- steps ------------------------------------------------------------------------------------------------------------


def test_what_every_step_was_fed_is_made_again_bit_for_bit(
    sample_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["step", "replay", str(sample_run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found) >= 16
    assert all(each["identical"] and each["recorded"] == each["rebuilt"] for each in found)
    assert main(["step", "replay", str(sample_run), "3", "--policy", "solver"]) == 0
    assert "solver@" in capsys.readouterr().out


@pytest.mark.damages_journal
@pytest.mark.parametrize(
    ("statement", "told"),
    [
        ("UPDATE step_units SET advantage = advantage + 1", "does not match its checksum"),
        ("DELETE FROM step_units WHERE position = 0", "rows of"),
        ("UPDATE episodes SET partition = NULL", "its record is missing"),
    ],
)
def test_a_step_whose_records_changed_is_told_apart(
    copied: Path, capsys: pytest.CaptureFixture[str], statement: str, told: str
) -> None:
    with sqlite3.connect(copied / "journal" / "control.db") as connection:
        connection.execute(statement)
    connection.close()
    assert main(["step", "replay", str(copied), "3", "--policy", "solver", "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["identical"], told in found["text"]) == (False, True)


class Opens(agentrl.Environment):
    """Opens a file that the task names."""

    selects = ("file",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        raise NotImplementedError


def test_a_resume_knows_the_tasks_at_the_end_of_a_large_source(tmp_path: Path) -> None:
    tasks = [Task(id=str(number), data={"file": f"/data/{number // 2}"}) for number in range(4000)]
    selected = selected_by_tasks(Opens, [tasks])

    def refusal(task: Task) -> str:
        spec = EpisodeSpec(episode_id="e0", environment=name_of(Opens), task=task, seed=0, seats={}, group_id="g0")
        return refusal_on_resume(tmp_path, Opens, selected, spec)

    assert len(selected) == 2000
    assert refusal(tasks[-1]) == ""
    assert "which no task of the configuration does" in refusal(Task(id="x", data={"file": "/data/2000"}))


@pytest.mark.damages_journal
def test_a_damaged_episode_is_no_success(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for partition in (copied / "journal").glob("turns-*.db"):
        with sqlite3.connect(partition) as connection:
            connection.execute("UPDATE entries SET checksum = checksum + 1")
        connection.close()
    for command in ("replay", "rescore"):
        assert main(["episode", command, str(copied), "e1", "--json"]) == 1
        (found,) = json.loads(capsys.readouterr().out)
        assert found["outcome"] == "damaged"


@pytest.mark.damages_journal
def test_an_altered_reward_is_damage(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with sqlite3.connect(copied / "journal" / "control.db") as connection:
        connection.execute("UPDATE trajectories SET reward = 2.0")
    connection.close()
    assert main(["episode", "replay", str(copied), "e1", "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)
    assert "`trajectories` does not match its checksum" in found["text"]


def test_a_step_that_begins_at_itself_is_damaged(sample_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = PolicyVersion("solver", 0, 3)
    monkeypatch.setattr(replays, "_batch", lambda reader, *key: (None, version))
    monkeypatch.setattr(replays, "find_checkpoint_of", lambda *_: None)
    with contextlib.closing(RunReader(sample_run)) as reader, pytest.raises(JournalError, match="begins at solver@"):
        replays._kept_checkpoint(reader, version, 0)


@pytest.mark.parametrize(
    ("policies", "is_damage"),
    [
        (["solver"], False),
        ({"solver": "many"}, False),
        ({"solver": {"max_lag": "many"}}, True),
        ({"solver": {"max_lag": [1]}}, True),
        ({"solver": {"max_lag": -1.5}}, True),
        ({"solver": {}}, False),
        ({"solver": {"max_lag": 4}}, False),
    ],
)
def test_a_recorded_bound_that_is_no_number_of_steps_is_damage(
    sample_run: Path, policies: object, is_damage: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = RunReader(sample_run)
    line = next(line for line in step_list(reader) if line.policy == "solver")
    monkeypatch.setattr(type(reader.log), "config", lambda self, lineage=None: {"policies": policies})
    result = replay_step(reader, line)
    reader.close()
    assert result.identical != is_damage
    assert ("max_lag" in result.text) == is_damage
