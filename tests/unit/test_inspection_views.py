"""What is asked of a run beyond its list: conversation, tokens, reasons, differences, figures, steps."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import io
import math
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from agentrl.cli.main import main
from agentrl.config.fields import resolve_package_directory
from agentrl.core.choices import Choices
from agentrl.core.errors import InputError, JournalError
from agentrl.core.text import escape_text, plural
from agentrl.inspection.comparisons import ReplayResult, compare_episodes, compare_episodes_across_runs, fork_tree
from agentrl.inspection.conversation import EffectAct, PolicyTurn, RewardAct, ToolAct, read_conversation
from agentrl.inspection.overview import run_overview
from agentrl.inspection.reader import EpisodeLine, RunReader
from agentrl.inspection.reasons import Reason, explain_conversation, explain_episode
from agentrl.inspection.render import (
    MAX_BLOCK,
    TerminalPage,
    episode_table,
    statistics_page,
    step_table,
)
from agentrl.inspection.render_episode import (
    _events_page,
    _summary_page,
    conversation_page,
    difference_page,
    reasons_page,
    replay_page,
    rescore_page,
    tokens_page,
)
from agentrl.inspection.statistics import run_state, run_statistics
from agentrl.inspection.steps import step_list, step_view
from agentrl.inspection.tokens import Vocabulary, base_model_directory, episode_tokens, read_step_rows
from agentrl.journal.run_log import RunStart
from agentrl.journal.store import SqliteJournal
from agentrl.observe.progress import LineDisplay
from agentrl.observe.run_state import RunDisplaySettings, RunState
from tests.journal_cases import HOSTILE, spec, write_run


@pytest.fixture
def reader(sample_run: Path) -> Iterator[RunReader]:
    opened = RunReader(sample_run)
    yield opened
    opened.close()


def shown(page: TerminalPage) -> str:
    stream = io.StringIO()
    Console(file=stream, width=200, soft_wrap=True).print(page)
    return stream.getvalue()


def first(reader: RunReader, where: str) -> EpisodeLine:
    return reader.episodes(where, sort="turns", limit=1)[0]


def said(found: list[Reason], about: str) -> str:
    return "\n".join(reason.text for reason in found if reason.about == about)


def test_a_failed_tool_call_is_a_reason_about_the_tool(reader: RunReader) -> None:
    view = read_conversation(reader, first(reader, "status = trained and environment ~ Solve").episode)
    acts = [
        msgspec.structs.replace(act, outcome="error", observation="error: KeyError: 'hall'")
        if isinstance(act, ToolAct)
        else act
        for act in view.acts
    ]
    reasons = explain_conversation(reader, msgspec.structs.replace(view, acts=acts))
    assert "tool add ended as error" in said(reasons, "tool")
    assert "tool add" not in said(reasons, "reward")


# --- one episode ------------------------------------------------------------------------------------------------------


def test_a_conversation_holds_every_act_with_its_times(reader: RunReader) -> None:
    line = first(reader, "status = trained and environment ~ Solve")
    view = read_conversation(reader, line.episode)
    turns = [act for act in view.acts if isinstance(act, PolicyTurn)]
    assert len(turns) == line.turns
    assert {(turn.seat, turn.policy) for turn in turns} == {("solver", "solver"), ("checker", "checker")}
    assert sum(act.value for act in view.acts if isinstance(act, RewardAct)) == pytest.approx(line.reward)
    assert any(isinstance(act, ToolAct) and act.name == "add" for act in view.acts)
    assert all(turn.at >= 0 and turn.waited >= 0 for turn in turns)
    assert max(turn.at + turn.seconds for turn in turns) <= (line.seconds or 0.0) + 0.05
    page = shown(conversation_page(view))
    assert f"reward       {line.reward:g}" in page
    assert "tool add(" in page
    parent = read_conversation(reader, str(line.parent))
    assert line.episode in [child.episode for child in parent.children]
    assert "children" in shown(conversation_page(parent))


def test_a_long_result_of_an_effect_is_shown_with_its_last_line() -> None:
    frames = [f"  frame {number:04}" for number in range(5000)]
    output = "\n".join(["Traceback (most recent call last):", *frames, "KeyError: 'the cause'\n"])
    value = {"output": output, "error": "exit status 1"}
    act = EffectAct(
        call="e.1",
        name="harness",
        arguments=None,
        value=value,
        error=None,
        guarantee="idempotent",
        level="",
        seconds=1.0,
    )
    lines = shown(_events_page([act])).rstrip().split("\n")
    assert lines[0].endswith('effect harness → {"error": "exit status 1"} [idempotent, 1.000 s]')
    assert [line.strip() for line in lines[1:4]] == ["output", "Traceback (most recent call last):", "…"]
    assert lines[4:] == [f"    {line}" for line in [*frames, "KeyError: 'the cause'"][-len(lines[4:]) :]]
    assert 1000 < len(lines) < 2000


def test_a_failure_of_several_lines_is_shown_as_lines() -> None:
    frames = [f"  frame {number}" for number in range(40)]
    said = "\n".join(["the program failed: write `failed_reward = 0.0`.", *frames, "KeyError: \x1b[31m'ad'"])
    page, why, terminal = TerminalPage(), reasons_page("e", [Reason("ended", said)]), io.StringIO()
    page.facts([("because", said)])
    LineDisplay(RunState(plan=RunDisplaySettings()), terminal).line(f"WARNING {said}")
    for text in (shown(page), shown(why), terminal.getvalue()):
        assert "\\n" not in text
        lines = [line.strip() for line in text.rstrip().split("\n")]
        assert lines[-41:] == [*map(str.strip, frames), "KeyError: \\x1b[31m'ad'"]
        assert all(line.startswith("    ") for line in text.rstrip().split("\n")[-41:])


def test_an_update_inside_a_turn_is_told_in_its_place(reader: RunReader) -> None:
    found = [
        (view, act)
        for line in reader.episodes("environment ~ Solve and turns > 0", limit=1000)
        for view in [read_conversation(reader, line.episode)]
        for act in view.acts
        if isinstance(act, PolicyTurn) and len(act.versions) > 1
    ]
    view, act = found[0]
    (_, before), (place, after) = act.versions[:2]
    assert f"{before} → {after}" in shown(conversation_page(view))
    assert f"↻ {after} took over after {place} " in shown(conversation_page(view))
    assert f"turn {act.turn}" in said(explain_episode(reader, view.summary.episode), "time")


def test_tokens_carry_what_sampled_and_what_trained_them(reader: RunReader) -> None:
    line = first(reader, "status = trained and environment ~ Solve")
    view = episode_tokens(reader, line.episode)
    (row,) = [row for row in view.rows if row.policy == "solver"]
    sampled = [token for token in row.tokens if token.loss_mask]
    assert sum(token.loss_mask for other in view.rows for token in other.tokens) == line.tokens
    assert [token.position for token in row.tokens] == list(range(len(row.tokens)))
    assert row.step is not None
    assert all(token.ratio is not None and token.lag is not None for token in sampled)
    assert all(
        token.ratio == pytest.approx(math.exp((token.trainer_logprob or 0.0) - (token.logprob or 0.0)), rel=1e-4)
        for token in sampled
    )
    text = "".join(token.text for token in sampled)
    turns = [act.text for act in read_conversation(reader, line.episode).acts if isinstance(act, PolicyTurn)]
    assert all(turn in text or turn in {"right", "wrong"} or "Hmm" in turn for turn in turns)
    assert "trained into solver@" in shown(tokens_page(view))
    assert f"{sampled[0].id}" in shown(tokens_page(view, details=True))


def test_the_location_of_a_tools_exception_is_shown() -> None:
    act = ToolAct(
        call="r#1",
        name="look",
        arguments={},
        observation="error: KeyError: 'hall'",
        outcome="error",
        external=False,
        seconds=0.0,
        location="trail.py:25 in look",
    )
    for observation in (act.observation, f"{act.observation}\nagain"):
        page = shown(_events_page([msgspec.structs.replace(act, observation=observation)]))
        assert "[error at trail.py:25 in look, 0.000 s]" in page


def test_an_untrained_policy_has_tokens_without_training(reader: RunReader) -> None:
    line = first(reader, "status = trained and environment ~ Solve")
    (row,) = [row for row in episode_tokens(reader, line.episode).rows if row.policy == "checker"]
    assert row.step is None
    assert {token.ratio for token in row.tokens} == {None}


def test_why_a_dropped_and_a_trained_episode_stand_where_they_stand(reader: RunReader) -> None:
    dropped = explain_episode(reader, reader.episodes("drop_reason = environment_error", limit=1)[0].episode)
    assert "LookupError: the page of" in said(dropped, "ended")
    assert "attempt 1 of 2" in said(dropped, "attempt")
    episode = reader.episodes("drop_reason = environment_error", limit=1)[0].episode
    (advice,) = [reason.advice for reason in dropped if reason.about == "ended"]
    assert f"`agentrl episode show {reader.path} {episode}` gives the exception" in advice
    line = first(reader, "status = trained and environment ~ Solve")
    trained = explain_episode(reader, line.episode)
    assert "as a child of" in said(trained, "admitted")
    assert "solver@" in said(trained, "training")
    assert "checker does not learn" in said(trained, "training")
    assert "compared" in said(trained, "group")
    assert "`agentrl env check`" in shown(reasons_page("e", dropped))


def test_a_dropped_episode_has_the_length_of_its_conversation(reader: RunReader) -> None:
    line = reader.episodes("drop_reason = environment_error", limit=1)[0]
    assert (line.turns, line.tokens) == (None, None)
    assert reader.episodes("turns = 0 or tokens = 0") == []
    view = read_conversation(reader, line.episode)
    turns = [act for act in view.acts if isinstance(act, PolicyTurn)]
    length = f"{plural(len(turns), 'turn')} and {plural(sum(act.tokens for act in turns), 'token')} before the failure"
    assert length in shown(_summary_page(view))


def test_a_parked_episode_says_so(reader: RunReader) -> None:
    ((episode,),) = reader.log.rows("SELECT episode FROM episodes WHERE metrics LIKE '%\"parked\"%' LIMIT 1")
    assert "resumed" in said(explain_episode(reader, episode), "time")


def test_forks_are_a_tree_and_part_from_their_parents_at_the_fork(reader: RunReader) -> None:
    tree = fork_tree(reader)
    assert [fork.depth for fork in tree] == [0, 1, 2, 1, 1]
    assert [fork.line.episode for fork in tree[1:]] == ["f0", "f3", "f1", "f2"]
    forks = RunReader(reader.path / "forks")
    parted = 0
    for name in ("f0", "f1", "f2"):
        found = compare_episodes(reader, f"forks/{name}", None)
        assert found.b.episode == tree[0].line.episode
        view = read_conversation(forks, name)
        assert found.same_acts >= view.inherited > 0
        turns = [isinstance(act, PolicyTurn) for act in view.acts]
        assert sum(turns[: view.inherited]) > 0
        assert view.summary.turns == sum(turns), "those of its parent count too, as in its parent"
        parted += found.departure is not None
    forks.close()
    assert parted, "other seeds say something else"
    assert "acts in common" in shown(difference_page(found))


def test_the_advice_for_several_replays_is_printed_once() -> None:
    departed = ReplayResult(
        episode="e0", attempt=0, outcome="departed", calls=1, recorded=2, text="it differs", advice="look at it"
    )
    results = [departed, msgspec.structs.replace(departed, episode="e1")]
    for page in (shown(replay_page(results)), shown(rescore_page(results))):
        assert (page.count("it differs"), page.count("look at it")) == (2, 1)


def test_the_time_between_a_parent_and_its_fork_is_no_wait(reader: RunReader) -> None:
    forks = RunReader(reader.path / "forks")
    for name in ("f0", "f1", "f2", "f3"):
        view = read_conversation(forks, name)
        taken_over, own = (
            [act for act in acts if isinstance(act, PolicyTurn)]
            for acts in (view.acts[: view.inherited], view.acts[view.inherited :])
        )
        ended = max(act.at + act.seconds for act in taken_over)
        tools = sum(act.seconds for act in view.acts if isinstance(act, ToolAct | EffectAct))
        assert -1e-6 <= own[0].at - ended <= tools + 1e-6
        assert "the wait before" not in said(explain_episode(forks, name), "time")
    forks.close()


def test_an_episode_is_the_same_as_itself_and_names_are_told_apart(reader: RunReader) -> None:
    line = first(reader, "status = trained")
    same = compare_episodes_across_runs(reader, line.episode, reader, line.episode)
    assert same.departure is None
    assert "they are the same" in shown(difference_page(same))
    with pytest.raises(InputError, match="fork"):
        compare_episodes(reader, line.episode, None)
    with pytest.raises(InputError, match="e99999"):
        compare_episodes(reader, line.episode, "e99999")


def test_an_attempt_has_its_own_column(reader: RunReader) -> None:
    again, first_attempts = reader.episodes("attempt > 0", limit=3), reader.episodes("attempt = 0", limit=3)
    headings, *rows = shown(episode_table(again, len(again))).splitlines()
    assert headings.split()[:2] == ["episode", "attempt"]
    assert [row.split()[:2] for row in rows] == [[line.episode, str(line.attempt)] for line in again]
    assert "attempt" not in shown(episode_table(first_attempts, 3))


# --- the run ----------------------------------------------------------------------------------------------------------


def test_the_figures_of_a_run_add_up(reader: RunReader) -> None:
    figures = run_statistics(reader)
    assert sum(kind.episodes for kind in figures.episodes) == reader.count("committed_at != null")
    for kind in figures.episodes:
        assert sum(kind.ended.values()) == kind.episodes
        assert kind.turns.low <= kind.turns.median <= kind.turns.high  # type: ignore[operator]
    assert {policy.policy: policy.steps for policy in figures.policies}["checker"] == 0
    [(trained,)] = reader.log.rows("SELECT count(*) FROM step_units")
    assert sum(sum(policy.staleness.values()) + policy.before_resume for policy in figures.policies) == trained
    assert any(policy.before_resume for policy in figures.policies)
    newest = dict(reader.log.rows("SELECT policy, max(step) FROM steps WHERE lineage = 1 GROUP BY policy"))
    assert {policy.policy: policy.steps for policy in figures.policies if policy.steps} == newest
    [(taken,)] = reader.log.rows("SELECT count(*) FROM steps")
    assert taken > sum(newest.values()), "some steps were undone"
    assert figures.repeated == reader.count("attempt > 0") == reader.count("status = repeated")
    assert "policies" in shown(statistics_page(figures))


@pytest.mark.damages_journal
def test_held_out_episodes_are_not_counted_as_in_flight(tmp_path: Path) -> None:
    asyncio.run(write_run(tmp_path))

    async def evaluate() -> None:
        journal = SqliteJournal(tmp_path / "journal")
        journal.admit(spec(98, purpose="evaluate"))
        await journal.close()

    asyncio.run(evaluate())
    with contextlib.closing(RunReader(tmp_path)) as reader:
        status = run_state(reader).status
        assert status is not None
        assert (run_statistics(reader).in_flight, reader.line().in_flight, status.in_flight) == (1, 1, 1)


def test_the_duration_of_a_run_leaves_out_its_stops(tmp_path: Path) -> None:
    asyncio.run(write_run(tmp_path / "run"))
    with sqlite3.connect(tmp_path / "run" / "journal" / "control.db") as database:
        ((first_step, last_step),) = database.execute("SELECT min(stepped_at), max(stepped_at) FROM steps")
        began = first_step - 100.0
        database.execute("UPDATE admissions SET admitted_at = ?", (began,))
        database.execute("UPDATE episodes SET committed_at = ?", (began + 10.0,))
        database.execute("UPDATE episodes SET committed_at = ? WHERE episode >= 'e3'", (last_step + 10.0,))
        database.execute("DELETE FROM meta WHERE key GLOB 'life.*'")
        for lineage, began_at in ((0, began), (1, began + 20.0), (2, began + 60.0), (3, last_step + 20.0)):
            start = RunStart(lineage=lineage, began_at=began_at)
            database.execute("INSERT INTO meta VALUES (?, ?)", (f"life.{lineage}", msgspec.json.encode(start).decode()))
    database.close()
    reader = RunReader(tmp_path / "run")
    status = run_state(reader).status
    assert status is not None
    durations = [run_statistics(reader).seconds, run_overview(reader).seconds, status.seconds]
    resumed, stops = run_overview(reader).resumed, reader.log.stops()
    reader.close()
    assert durations == [pytest.approx(last_step + 10.0 - began - 50.0)] * 3, "one definition everywhere"
    assert resumed == 3
    assert stops == [(pytest.approx(began + 10.0), pytest.approx(began + 60.0))], "nothing followed the last start"


def test_the_stops_of_a_run_are_found_in_one_pass_and_leave_no_negative_duration(tmp_path: Path) -> None:
    asyncio.run(write_run(tmp_path / "run"))
    database = sqlite3.connect(tmp_path / "run" / "journal" / "control.db")
    with database:
        database.execute("UPDATE admissions SET admitted_at = 100.0")
        database.execute("UPDATE episodes SET committed_at = 105.0")
        database.execute("UPDATE steps SET stepped_at = 106.0")
        database.execute("UPDATE episodes SET committed_at = 5.0 WHERE episode = (SELECT min(episode) FROM episodes)")
        database.execute("DELETE FROM meta WHERE key GLOB 'life.*'")
        for lineage in range(20):
            start = RunStart(lineage=lineage, began_at=80.0 + lineage)
            database.execute("INSERT INTO meta VALUES (?, ?)", (f"life.{lineage}", msgspec.json.encode(start).decode()))
    database.close()
    reader = RunReader(tmp_path / "run")
    statements: list[str] = []
    reader.log.connection.set_trace_callback(statements.append)
    assert reader.log.stops() == [(5.0, 99.0)], "the clock was set back when one episode ended"
    reader.log.connection.set_trace_callback(None)
    assert sum("admissions" in statement for statement in statements) == 1
    assert reader.log.seconds() == 0.0
    reader.close()


def test_steps_are_listed_with_those_a_rollback_undid(reader: RunReader) -> None:
    lines = step_list(reader)
    assert {line.policy for line in lines} == {"solver", "proposer"}
    surviving = [(line.policy, line.step) for line in lines if line.survives]
    assert len(surviving) == len(set(surviving)) == 16
    assert [line.step for line in step_list(reader, "solver") if line.survives] == list(range(1, 9))
    assert "solver" in shown(step_table(lines))


def test_a_step_without_a_gradient_says_so_in_the_list(sample_run: Path, tmp_path: Path) -> None:
    path = shutil.copytree(sample_run, tmp_path / "run")
    with contextlib.closing(sqlite3.connect(path / "journal" / "control.db")) as log, log:
        log.execute("DELETE FROM metrics WHERE step = 8 AND name LIKE 'advantage/%'")
        log.executemany(
            "INSERT INTO metrics (policy, step, name, value, recorded_at) VALUES ('solver', 8, ?, ?, 1e12)",
            [("zero_gradient", 1.0), ("advantage/zero_share", 1.0), ("advantage/alone_share", 0.0)],
        )
    with contextlib.closing(RunReader(path)) as reader:
        lines = step_list(reader)
        view = step_view(reader, 8, "solver")
    without = [(line.policy, line.step, line.survives) for line in lines if line.no_gradient]
    assert without == [("solver", 8, True)]
    assert view.line.no_gradient == "no gradient: all groups were equal"
    rows = [row for row in shown(step_table(lines)).splitlines() if "no gradient" in row]
    assert len(rows) == 1
    assert rows[0].endswith("no gradient: all groups were equal")


def test_a_step_shows_what_it_was_fed(reader: RunReader) -> None:
    view = step_view(reader, 3, "solver")
    assert view.line.units == len(view.fed) == 16
    assert sum(fed.tokens or 0 for fed in view.fed) == view.line.tokens
    assert all(fed.advantage == pytest.approx(fed.reward - fed.baseline) for fed in view.fed)
    with pytest.raises(InputError, match="proposer and solver"):
        step_view(reader, 3)
    with pytest.raises(InputError, match="77"):
        step_view(reader, 77, "solver")


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def damaged(sample_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sample_run, tmp_path / "damaged", symlinks=True))


def change(run: Path, statement: str, *values: object) -> None:
    with sqlite3.connect(run / "journal" / "control.db") as connection:
        connection.execute(statement, values)
    connection.close()


@pytest.mark.damages_journal
def test_altered_records_are_told_and_the_rest_is_shown(damaged: Path) -> None:
    change(damaged, "UPDATE episodes SET reward = 100 WHERE episode = 'e2'")
    change(damaged, "UPDATE step_units SET advantage = 9 WHERE step = 3 AND policy = 'solver' AND position = 0")
    change(damaged, "UPDATE steps SET loss = 9 WHERE step = 4 AND policy = 'solver'")
    reader = RunReader(damaged)
    (line,) = reader.episodes("reward > 50")
    assert (line.episode, "checksum" in str(line.problem)) == ("e2", True)
    assert "checksum" in shown(episode_table([line], 1))
    assert "checksum" in said(explain_episode(reader, "e2"), "problem")
    view = step_view(reader, 3, "solver")
    assert (len(view.fed), len(view.problems)) == (15, 1)
    assert 4 not in [step.step for step in step_list(reader, "solver")]
    reader.close()


@pytest.mark.damages_journal
@pytest.mark.parametrize("size", [0, 7, 100, 5000])
def test_a_cut_file_of_columns_is_told(damaged: Path, size: int) -> None:
    path = damaged / "steps" / "solver" / "0.3.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    reader = RunReader(damaged)
    view = step_view(reader, 3, "solver")
    assert (len(view.fed), view.fed[0].tokens) == (16, None)
    assert "damaged" in view.problems[0]
    trained = view.fed[0].episode
    assert "damaged" in " ".join(episode_tokens(reader, trained).problems)
    reader.close()


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "", 7])
def test_columns_outside_the_run_are_not_read(damaged: Path, name: object) -> None:
    with pytest.raises(JournalError):
        read_step_rows(damaged, name)


def test_every_byte_of_a_file_of_columns_changed_gives_an_answer_or_a_named_error(damaged: Path) -> None:
    path = damaged / "steps" / "proposer" / "0.1.safetensors"
    whole = path.read_bytes()
    read = 0
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        try:
            read_step_rows(damaged, "steps/proposer/0.1.safetensors")
            read += 1
        except JournalError:
            continue
    assert read > 0


# --- content ----------------------------------------------------------------------------------------------------------


def test_hostile_content_in_every_view_reaches_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(write_run(tmp_path / "run", text=HOSTILE, name=HOSTILE))
    run = str(tmp_path / "run")
    commands = [["episode", verb, run, "e1"] for verb in ("show", "tokens", "why")]
    commands += [["episode", "tokens", run, "e1", "--details"], ["episode", "diff", run, "e1", "e2"]]
    commands += [["run", "stats", run], ["step", "list", run]]
    commands += [["episode", "list", run, "--match", "script"]]
    commands += [["episode", "list", run, "--columns", "episode,environment,detail,drop_reason"]]
    for command in commands:
        for arguments in (command, [*command, "--json"]):
            assert main(arguments) == 0, arguments
            output = capsys.readouterr()
            assert escape_text(output.out + output.err) == output.out + output.err, arguments


def test_every_code_point_is_escaped_by_every_part_of_a_page() -> None:
    everything = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000, 61)]))
    for start in range(0, len(everything), 400):
        text = everything[start : start + 400]
        page = TerminalPage()
        page.line(text, (text, "red"))
        page.heading(text)
        page.block(text)
        page.flow([(text, "red")])
        page.facts([(text, text)])
        page.table([text], [[text]], caption=text)
        page.problems([text])
        found = shown(page)
        assert escape_text(found) == found
        assert "\r" not in found


def test_markup_is_shown_as_it_is_and_a_long_block_has_an_end() -> None:
    page = TerminalPage()
    page.line("[bold]x[/bold]", ("[link=https://a.b]c[/link]", "red"))
    page.block("y" * (MAX_BLOCK + 5))
    found = shown(page)
    assert "[bold]x[/bold][link=https://a.b]c[/link]" in found
    assert "and 5 more characters" in found


def test_ids_become_text_where_the_tokenizer_is_here(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(
        '{"model": {"vocab": {"Hello": 0, "\\u0120world": 1, "\\u010a": 2}},'
        ' "added_tokens": [{"id": 3, "content": "<eos>"}]}'
    )
    vocabulary = Vocabulary(str(tmp_path))
    assert [vocabulary.text(token) for token in range(5)] == ["Hello", " world", "\n", "<eos>", ""]
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"\\u2581a": 0, "<0x0A>": 1}}}')
    assert [Vocabulary(str(tmp_path)).text(token) for token in range(2)] == [" a", "\n"]
    (tmp_path / "tokenizer.json").write_text("[" * 100_000)
    assert not Vocabulary(str(tmp_path)).is_known
    assert not Vocabulary(None).is_known


def test_only_the_user_names_a_runs_tokenizer(tmp_path: Path) -> None:
    run, model, other = (str(tmp_path / name) for name in ("run", "model", "other"))
    own = resolve_package_directory("agentrl.environments.calculator:model")
    policies = {"solver": {"model": ""}, "judge": {"model": other}, "past": {"kind": "past", "of": "judge"}}

    def found(model: str, *names: str) -> list[str | None]:
        config = {"model": {"path": model}, "policies": policies}
        return [base_model_directory(Path(run), config, name) for name in names]

    assert found(model, "solver", "judge", "past") == [None, None, None]
    assert found(own, "solver") == [own]
    assert found(f"{own}/../../../..{model}", "solver") == [None]
    settings = {"model.path": [model], "policies.judge.model": ["another"]}
    dataclasses.replace(Choices.of(Path(run)), settings=settings).save()
    assert found(model, "solver", "judge", "past") == [model, None, None]
    dataclasses.replace(Choices.of(Path(run)), named={"policies.judge.model": model}).save()
    assert found(model, "solver", "judge", "past") == [model, model, model]
