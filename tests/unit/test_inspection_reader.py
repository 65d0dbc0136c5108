"""Reading runs: lists, filters, one episode, the curve; hostile and damaged content."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
import sqlite3
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from agentrl.cli.main import main
from agentrl.core.errors import InputError, JournalError
from agentrl.core.records import PolicyVersion
from agentrl.core.text import escape_text
from agentrl.inspection.conversation import PolicyTurn, read_conversation
from agentrl.inspection.reader import RunReader, list_runs, reward_columns
from agentrl.inspection.reasons import explain_episode
from agentrl.inspection.render import MAX_CELL, episode_table, reward_curves_page, run_table, statistics_page
from agentrl.inspection.render_episode import conversation_page, tokens_page
from agentrl.inspection.statistics import run_statistics
from agentrl.inspection.steps import step_list
from agentrl.inspection.tokens import episode_tokens
from agentrl.inspection.where_filter import json_column, parse_where_filter
from agentrl.journal.entries import ExternalRequestParameters, encode_body, entry_checksum
from agentrl.journal.port import MetricRow, UnitDropped, VersionPublication
from agentrl.journal.store import SqliteJournal
from tests.journal_cases import (
    HOSTILE,
    OFFERED,
    entries_with,
    train_bargains,
    weights,
    write_bargains,
    write_offers,
    write_prompt,
    write_run,
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    asyncio.run(write_run(tmp_path / "demo"))
    return tmp_path / "demo"


def shown(renderable: object) -> str:
    stream = io.StringIO()
    Console(file=stream, width=200, soft_wrap=True).print(renderable)
    return stream.getvalue()


def test_a_unit_that_was_dropped_gives_its_reason_to_its_episode(run: Path) -> None:
    async def drop() -> None:
        journal = SqliteJournal(run / "journal")
        journal.record(UnitDropped("e4", 0, "policy", "frozen"), UnitDropped("e1", 0, "other", "no_signal"))
        await journal.close()

    asyncio.run(drop())
    with contextlib.closing(RunReader(run)) as reader:
        (line,) = reader.episodes("drop_reason = frozen")
        assert (line.episode, line.status, line.drop_reason) == ("e4", "dropped", "frozen")
        assert line.stop_reason == "completed"
        assert not reader.episodes("drop_reason = no_signal"), "another policy was trained on it"
        assert reader.counts()[1]["frozen"] == 1
        reasons = {reason.about: reason.text for reason in explain_episode(reader, "e4")}
        assert reasons["ended"].startswith("completed")
        assert reasons["training"] == "of policy: dropped as frozen"


def test_episodes_are_listed_filtered_and_sorted(run: Path) -> None:
    reader = RunReader(run)
    assert [line.episode for line in reader.episodes()] == ["e99", "e5", "e4", "e3", "e2", "e1", "e0"]
    assert [line.episode for line in reader.episodes("reward >= 3 and status != dropped")] == ["e4", "e3"]
    assert [line.episode for line in reader.episodes("status = trained", sort="reward", descending=False)] == [
        "e0",
        "e1",
        "e2",
        "e3",
    ]
    assert [line.status for line in reader.episodes(sort="turns", limit=3)] == ["dropped", "ready", "trained"]
    assert [line.episode for line in reader.episodes("reward = null")] == ["e99"]
    assert [line.episode for line in reader.episodes("not reward > 1 and policies ~ pol")] == ["e1", "e0"]
    assert [line.episode for line in reader.episodes("metric.accuracy = 0.5 and reward > 3")] == ["e5", "e4"]
    assert reader.count("metric.accuracy > 0.5") == reader.count("metric.other > 0") == 0
    assert [line.episode for line in reader.episodes('data.question = "2 + 3"')] == ["e99"]
    assert (reader.count("data.q = plain"), reader.count("data.q != plain or data.nothing = 1")) == (6, 0)
    asked = reader.episodes(sort="data.question", fields=["data.question", "metric.accuracy"], limit=2)
    assert [line.fields for line in asked] == [
        {"data.question": "2 + 3", "metric.accuracy": None},
        {"data.question": None, "metric.accuracy": 0.5},
    ]
    assert reader.field_names() == {
        "reward/": ["reward/solver"],
        "metric.": ["metric.accuracy"],
        "data.": ["data.nested", "data.q", "data.question"],
    }
    assert [line.episode for line in reader.episodes(limit=2, offset=2)] == ["e4", "e3"]
    assert (reader.count(), reader.count("turns < 2")) == (7, 2)
    first = reader.episodes("episode = e1")[0]
    assert (first.seats, first.policies, first.reward, first.oldest_step) == ({"solver": "policy"}, ["policy"], 1.0, 0)
    reader.close()


def test_several_rewarded_seats_have_a_column_each_and_no_sum(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], run: Path
) -> None:
    asyncio.run(write_bargains(tmp_path / "shop"))
    reader = RunReader(tmp_path / "shop")
    assert reader.reward_columns() == ["reward/buyer", "reward/seller"]
    (line,) = reader.episodes("reward/buyer > 0.6", fields=["reward/seller", "metric.agreed"])
    assert (line.episode, line.reward, line.rewards) == ("e5", None, {"buyer": 0.75, "seller": -0.75})
    assert line.fields == {"reward/seller": -0.75, "metric.agreed": 1.0}
    assert [each.episode for each in reader.episodes(sort="reward/seller", limit=4)][2:] == ["e0", "e1"]
    for ask in (
        lambda: reader.episodes("reward > 0 and turns > 1"),
        lambda: reader.count("reward = null"),
        lambda: reader.episodes(sort="reward"),
    ):
        with pytest.raises(InputError, match="use reward/buyer or reward/seller"):
            ask()
    with pytest.raises(InputError, match="reward/buyer must be compared with a number"):
        reader.episodes("reward/buyer > much")
    (figures,) = run_statistics(reader).episodes
    assert {name: spread.mean for name, spread in figures.rewards.items()} == {
        "reward/buyer": 0.25,
        "reward/seller": -0.25,
    }
    assert re.search(r"reward/seller +-0\.25 ", shown(statistics_page(run_statistics(reader))))
    group = " ".join(reason.text for reason in explain_episode(reader, "e1"))
    assert "rewards of buyer from 0 to 0.25, mean 0.125; rewards of seller from -0.25 to 0, mean -0.125" in group
    reader.close()

    shop = str(tmp_path / "shop")
    assert main(["episode", "list", shop]) == 0
    headings, newest, *_ = capsys.readouterr().out.splitlines()
    assert [name for name in headings.split() if name.startswith("reward")] == ["reward/buyer", "reward/seller"]
    assert newest.split()[3:5] == ["0.75", "-0.75"], "all episodes are of one environment, which is left out"
    assert main(["episode", "list", shop, "--columns", "episode,reward/seller", "--limit", "1", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert (told["reward"], told["rewards"]["buyer"], told["fields"]["reward/seller"]) == (None, 0.75, -0.75)
    assert main(["episode", "show", shop, "e5"]) == 0
    assert re.search(r"reward +buyer 0\.75, seller -0\.75\n", capsys.readouterr().out)
    single = RunReader(run)
    assert single.reward_columns() == ["reward"]
    (three,) = single.episodes("episode = e3")
    assert three.rewards == {"solver": 3.0}
    single.close()
    mixed = shown(episode_table([line, three], 2)).splitlines()[1:]
    assert [row.split()[4:7] for row in mixed] == [["0.75", "-0.75", "completed"], ["3", "completed", "3"]]
    assert "buyer 0.75, seller -0.75" in shown(episode_table([line, three], 2, ["episode", "reward"]))


def test_curves_steps_and_runs_show_the_reward_of_each_seat_and_no_sum(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(write_bargains(tmp_path / "shop"))
    asyncio.run(train_bargains(tmp_path / "shop"))
    by_seat = [{"buyer": 0.125 * step, "seller": -0.125 * step} for step in (1, 2, 3)]
    with contextlib.closing(RunReader(tmp_path / "shop")) as reader:
        assert [(point.reward, point.units, point.rewards) for point in reader.curve()] == [
            (None, 2, rewards) for rewards in by_seat
        ]
        assert [(line.reward, line.rewards) for line in step_list(reader)] == [(None, rewards) for rewards in by_seat]
        curves = shown(reward_curves_page(reader.curve()))
        assert "reward of trader as buyer  0.125 → 0.375" in curves
        assert "reward of trader as seller  -0.125 → -0.375" in curves
        assert "reward of trader  " not in curves
    shop = str(tmp_path / "shop")
    for command, told in (
        (["step", "list", shop], ["reward/buyer reward/seller loss", "trader 0.3 0.375 -0.375"]),
        (["run", "list", str(tmp_path)], ["buyer 0.25, seller -0.25"]),
    ):
        assert main(command) == 0
        page = " ".join(capsys.readouterr().out.split())
        assert all(part in page for part in told), page


@pytest.mark.parametrize(
    ("rewarded", "columns"),
    [
        ([], ["reward"]),
        ([["solver"], ["judge"]], ["reward"]),
        ([["buyer", "seller"], ["buyer"]], ["reward/buyer", "reward/seller"]),
        ([["buyer", "seller"], ["solver"]], ["reward", "reward/buyer", "reward/seller"]),
    ],
)
def test_one_function_chooses_the_reward_columns(rewarded: list[list[str]], columns: list[str]) -> None:
    assert reward_columns(rewarded) == columns


def test_an_episode_shows_the_tools_and_worked_examples_that_the_policy_saw(tmp_path: Path) -> None:
    asyncio.run(write_offers(tmp_path / "offers"))
    request = ExternalRequestParameters(
        max_tokens=9,
        stop=("END",),
        tools='[{"name": "look_up"}]',
        asked={"temperature": 0.25, "top_p": 1.0, "presence_penalty": 0.0, "tool_choice": "required", "top_k": 40},
        ignored=("seed",),
    )
    asyncio.run(write_prompt(SqliteJournal(tmp_path / "outside" / "journal"), b"\0" * 8, request=request))
    views = []
    for name in ("offers", "outside"):
        reader = RunReader(tmp_path / name)
        views.append(read_conversation(reader, "e0"))
        tokens = [shown(tokens_page(episode_tokens(reader, "e0"), details=details)) for details in (False, True)]
        reader.close()
    view, external = views
    assert [act.beside_messages for act in view.acts if isinstance(act, PolicyTurn)] == [OFFERED, ""]
    assert [act.beside_messages for act in external.acts if isinstance(act, PolicyTurn)] == [request.tools, ""]
    page = shown(conversation_page(view))
    assert page.count("add(a: integer) Add.") == 1
    assert '→ add({"a": 1})' in page, "the example's call, whose message has no content"
    assert page.index("add(a: integer)") < page.index("What is 1 + 1?") < page.index("→ add") < page.index("5 + 7")
    assert "drift: its text would be tokenized differently; the tokens are kept and trained as sampled" in page
    assert "<|im_" not in page
    page = shown(conversation_page(external))
    assert "look_up" in page
    fields = 'asked for temperature 0.25, tool_choice required, top_k 40, max_tokens 9, stop ["END"]'
    assert page.count(f"{fields}; without effect: seed") == 1
    assert [text.count(fields) for text in tokens] == [1, 1]


def test_one_episode_is_shown_with_its_conversation(run: Path) -> None:
    reader = RunReader(run)
    view = reader.episode("e3")
    assert (view.summary.reward, view.agents[0].reward, view.metrics, view.problems) == (
        3.0,
        3.0,
        {"accuracy": 0.5},
        [],
    )
    assert [call for call, _ in view.entries] == ["r#0", "r#1", "r#2", "r#3"]
    text = shown(conversation_page(read_conversation(reader, view.summary.episode)))
    assert "solver[0] · policy" in text
    assert "2 tokens of policy@0.0" in text
    assert "reward 3 to solver[0]" in text
    assert [call for call, _ in reader.episode("e99").entries] == ["begin"]  # in flight: found without a commit
    with pytest.raises(InputError, match="e77"):
        reader.episode("e77")
    reader.close()


def test_the_curve_and_the_metrics(run: Path) -> None:
    reader = RunReader(run)
    assert [(point.step, point.reward, point.units) for point in reader.curve()] == [(1, 0.5, 2), (2, 2.5, 2)]
    assert reader.metric("loss") == {"policy": [(1, 0.1), (2, 0.2)]}
    assert reader.metric("grad_norm") == {"policy": [(1, None), (2, None)]}
    assert reader.metric_names() == ["grad_norm", "loss"]
    assert "reward of policy  0.50 → 2.50" in shown(reward_curves_page(reader.curve()))
    reader.close()


def test_a_metric_is_told_along_the_surviving_line(tmp_path: Path) -> None:
    async def write() -> None:
        journal = SqliteJournal(tmp_path / "journal")
        for lineage, parent, first in ((0, None, 0), (1, PolicyVersion("policy", 0, 4), 4)):
            journal.record(VersionPublication(weights("policy", lineage, first), parent))
            for step in range(first, 7 - lineage):
                journal.record(
                    VersionPublication(weights("policy", lineage, step), PolicyVersion("policy", lineage, step - 1))
                )
                journal.record(MetricRow("policy", step, {"loss": lineage + 0.1 * step}))
            journal.record(MetricRow("policy", 6 - lineage, {"evaluation/reward": float(lineage)}))
        await journal.close()

    asyncio.run(write())
    reader = RunReader(tmp_path)
    assert reader.metric("loss") == {"policy": [*((step, 0.1 * step) for step in range(4)), (4, 1.4), (5, 1.5)]}
    assert reader.metric("evaluation/reward") == {"policy": [(5, 1.0)]}
    reader.close()


@pytest.mark.damages_journal
def test_runs_are_listed_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    asyncio.run(write_run(tmp_path / "good"))
    (tmp_path / "bad" / "journal").mkdir(parents=True)
    (tmp_path / "bad" / "journal" / "control.db").write_bytes(b"rubbish" * 1000)
    (tmp_path / "empty").mkdir()
    bad, good = list_runs(tmp_path)
    assert (good.name, good.episodes, good.in_flight, good.steps, good.rewards) == (
        "demo",
        5,
        1,
        {"policy": 2},
        {"policy": 1.5},
    )
    assert bad.problem is not None
    assert "control.db" in bad.problem
    assert "control.db" in shown(run_table([bad, good]))
    assert "reward: of training runs, the mean of the last 5 steps" in shown(run_table([good]))


def test_no_run_no_column_no_directory_are_told(run: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a directory of runs, not a run; name one: demo"):
        RunReader(tmp_path)
    with pytest.raises(InputError, match="nowhere"):
        list_runs(tmp_path / "nowhere")
    reader = RunReader(run)
    with pytest.raises(InputError, match="reward"):
        reader.episodes("rewrad < 0")
    with pytest.raises(InputError, match="status is one of in_flight, ready, trained, finished"):
        reader.episodes("status = running")
    with pytest.raises(InputError, match="--sort"):
        reader.episodes(sort="reward; DROP TABLE episodes")
    reader.close()


def test_hostile_content_in_every_field_reaches_no_terminal(tmp_path: Path) -> None:
    asyncio.run(write_run(tmp_path, text=HOSTILE, name=HOSTILE))
    reader = RunReader(tmp_path)
    pages = [shown(episode_table(reader.episodes(), reader.count())), shown(run_table([reader.line()]))]
    pages += [shown(conversation_page(read_conversation(reader, f"e{number}"))) for number in range(6)]
    for page in pages:
        assert escape_text(page) == page
        assert "[bold]" in page or "e99" in page
    assert reader.count() == 7
    reader.close()


def test_a_damaged_partition_leaves_the_rest_readable(run: Path) -> None:
    with sqlite3.connect(run / "journal" / "turns-w0.db") as connection:
        connection.execute("UPDATE entries SET body = x'00' WHERE episode = 'e1' AND call = 'r#1'")
    connection.close()
    reader = RunReader(run)
    view = reader.episode("e1")
    assert (view.summary.reward, view.entries) == (1.0, [])
    assert "checksum" in view.problems[0]
    assert "not readable" in shown(conversation_page(read_conversation(reader, view.summary.episode)))
    assert reader.episode("e2").problems == []
    (run / "journal" / "turns-w0.db").unlink()
    fresh = RunReader(run)
    assert "no such file" in fresh.episode("e2").problems[0]
    reader.close()
    fresh.close()


@pytest.mark.damages_journal
@pytest.mark.parametrize(
    "change",
    [
        "UPDATE episodes SET reward = 'a lot'",
        "UPDATE episodes SET seats = '{{{'",
        "UPDATE episodes SET tokens = x'ff00'",
        "UPDATE admissions SET admitted_at = 'now'",
        "UPDATE trajectories SET lineage = 1.5",
    ],
)
def test_wrong_types_in_the_control_log_are_a_named_error(run: Path, change: str) -> None:
    with sqlite3.connect(run / "journal" / "control.db") as connection:
        connection.execute(change)
    connection.close()
    reader = RunReader(run)
    with pytest.raises(JournalError, match="damaged"):
        reader.episode("e1")
    reader.close()


@pytest.mark.damages_journal
def test_every_page_of_a_database_flipped_or_cut_gives_an_answer_or_a_named_error(run: Path) -> None:
    """One byte of each 512 changed, and the file cut there: never another exception."""
    path = run / "journal" / "control.db"
    whole = path.read_bytes()
    answers = 0
    for at in range(0, len(whole), 512):
        for damaged in (whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :], whole[:at]):
            path.write_bytes(damaged)
            try:
                reader = RunReader(run)
            except JournalError:
                continue
            try:
                reader.episodes()
                reader.episode("e1")
                reader.curve()
                answers += 1
            except (JournalError, InputError):
                continue
            finally:
                reader.close()
    assert answers > 0


def change_control(run: Path, statement: str, *parameters: object) -> None:
    with sqlite3.connect(run / "journal" / "control.db") as connection:
        connection.execute(statement, parameters)
    connection.close()


@pytest.mark.damages_journal
@pytest.mark.parametrize(
    "change",
    [
        f"UPDATE meta SET value = '{'[' * 100_000}' WHERE key = 'info'",
        "UPDATE versions SET parent_lineage = 'x' WHERE step = 0",
        "UPDATE versions SET parent_lineage = 0, parent_step = x'00' WHERE step = 0",
        "UPDATE versions SET lineage = 'x'",
    ],
)
def test_one_hostile_run_hides_no_other(tmp_path: Path, change: str) -> None:
    for name in ("good", "hostile"):
        asyncio.run(write_run(tmp_path / name))
    change_control(tmp_path / "hostile", change)
    good, hostile = list_runs(tmp_path)
    assert (good.episodes, good.problem) == (5, None)
    assert hostile.problem is not None
    assert "damaged" in hostile.problem


def with_arguments(arguments: bytes) -> bytes:
    """A tool entry whose arguments are this msgpack."""
    whole = encode_body(entries_with(0, "plain")[2])
    plain = msgspec.msgpack.encode({"plain": "plain"})
    assert plain in whole
    return whole.replace(plain, arguments)


@pytest.mark.damages_journal
@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (b"\x81\x91\x01\x01", "a key of type tuple"),
        (b"\x91\x81\xc4\x01a\x01", "a key of type bytes"),
        (b"\xd4\x05\x00", "a value of type Ext"),
        (b"\x91" * 100_000 + b"\x01", "not an entry of this journal format"),
        (b"\x91" * 200 + b"\x01", "nested deeper than 100"),
        (b"\xa1\xff", "not an entry of this journal format"),
    ],
)
def test_content_that_cannot_be_shown_is_named_and_the_rest_is_shown(run: Path, arguments: bytes, problem: str) -> None:
    body = with_arguments(arguments)
    with sqlite3.connect(run / "journal" / "turns-w0.db") as connection:
        checksum = entry_checksum("e1", 0, "r#2", b"", body)
        connection.execute(
            "UPDATE entries SET body = ?, checksum = ? WHERE episode = 'e1' AND call = 'r#2'", (body, checksum)
        )
    connection.close()
    change_control(run, "UPDATE episodes SET digest = x''")
    reader = RunReader(run)
    view = reader.episode("e1")
    assert [call for call, _ in view.entries] == ["r#0", "r#1", "r#3"]
    (told,) = view.problems
    assert problem in told
    assert "episode e1, call r#2" in told
    assert "not readable" in shown(conversation_page(read_conversation(reader, view.summary.episode)))
    reader.close()


@pytest.mark.damages_journal
def test_rows_of_other_types_are_problems_of_the_episode(run: Path) -> None:
    change_control(run, """UPDATE episodes SET metrics = '{"x": "much", "y": 2, "z": null}' WHERE episode = 'e1'""")
    change_control(run, "UPDATE episodes SET partition = x'00' WHERE episode = 'e2'")
    reader = RunReader(run)
    first, second = reader.episode("e1"), reader.episode("e2")
    assert (first.metrics, len(first.entries)) == ({"y": 2.0, "z": None}, 4)
    assert first.problems[1:] == ["metric 'x' is not a number; its row of the control log is damaged"]
    assert "`episodes`" in first.problems[0]
    assert "turn partition" in second.problems[0]
    shown(conversation_page(read_conversation(reader, "e1")))
    reader.close()


@pytest.mark.damages_journal
def test_a_cell_has_an_end(run: Path) -> None:
    change_control(run, "UPDATE admissions SET task = ? WHERE episode = 'e1'", "t" * 1_000_000)
    reader = RunReader(run)
    page = shown(episode_table(reader.episodes(), reader.count()))
    reader.close()
    assert page.count("t" * 20) > 0
    assert page.count("…") == 1
    assert len(page) < 100 * MAX_CELL


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("True", 1),
        ("false", 0),
        ("'True'", "True"),
        ("1234567890123456789", 1234567890123456789),
        ("0.5", 0.5),
        ("1e400", float("inf")),
        ("nan", "nan"),
        ("infinity", "infinity"),
    ],
)
def test_a_field_is_compared_with_the_value_that_was_written(text: str, value: object) -> None:
    found = parse_where_filter(f"data.x = {text}", {}, {"data.": json_column("task_data")})
    assert (found.values, type(found.values[-1])) == (("x", value), type(value))


def test_no_column_of_numbers_is_compared_with_nan(run: Path) -> None:
    with (
        contextlib.closing(RunReader(run)) as reader,
        pytest.raises(InputError, match="must be compared with a number"),
    ):
        reader.episodes("reward = nan")
