"""Other tools' files as runs: what they tell is there, what they do not tell is said, and nothing hostile comes in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.cli.main import main
from agentrl.core.errors import InputError
from agentrl.exchange import files
from agentrl.exchange.exporting import export
from agentrl.exchange.importing import import_run
from agentrl.inspection.conversation import (
    ConversationView,
    OtherAct,
    PolicyTurn,
    RewardAct,
    ToolAct,
    read_conversation,
)
from agentrl.inspection.reader import RunReader
from agentrl.inspection.search import episodes_with_words
from agentrl.inspection.tokens import episode_tokens
from agentrl.inspection.viewer.queries import answer_viewer_query

TRACES = Path(__file__).parents[1] / "exchange_files" / "verifiers_0_4_traces.jsonl"
"""Written by verifiers 0.4.0: one agent and tokens; branches, several agents, no tokens; an episode that failed."""


@pytest.fixture
def theirs(tmp_path: Path) -> Iterator[RunReader]:
    import_run(TRACES, "verifiers", tmp_path / "theirs")
    reader = RunReader(tmp_path / "theirs")
    yield reader
    reader.close()


def lines(path: Path, *values: Any) -> Path:
    path.write_text("\n".join(value if isinstance(value, str) else json.dumps(value) for value in values))
    return path


def episode(name: str = "one", **changes: Any) -> dict[str, Any]:
    """A line of verifiers' with one turn."""
    said = {"message": {"role": "assistant", "content": "4"}, "parent": 0, "sampled": True}
    nodes = [{"message": {"role": "user", "content": "2 + 2"}}, said]
    return {"id": name, "ok": True, "traces": [{"agent": {"name": "solver"}, "nodes": nodes}]} | changes


def saying(*calls: Any) -> dict[str, Any]:
    """A trace with one turn that calls tools."""
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    return {"nodes": [{"message": message, "sampled": True}]}


def branches(content: Any, *calls: Any) -> dict[str, Any]:
    """A trace with many branches that begin alike."""
    first = {"message": {"role": "user", "content": content, "tool_calls": calls}}
    return {"nodes": [first, *[{"message": {"role": "user"}, "parent": 0}] * 40_000]}


def nested(levels: int) -> Any:
    return {"a": nested(levels - 1)} if levels else 1


def trajectory(**changes: Any) -> dict[str, Any]:
    steps = [
        {"step_id": 1, "source": "user", "message": "2 + 2"},
        {"step_id": 2, "source": "agent", "message": "4", "reasoning_content": "easy"},
    ]
    return {"schema_version": "ATIF-v1.4", "agent": {"name": "terminus", "version": "2"}, "steps": steps} | changes


# --- verifiers --------------------------------------------------------------------------------------------------------


def test_an_episode_of_verifiers_is_read_like_any_other(theirs: RunReader) -> None:
    line = theirs.lines([("a" * 32, 0)])[0]
    assert (line.purpose, line.status, line.environment, line.group) == ("import", "finished", "sums", "g1")
    assert (line.reward, line.turns, line.tokens, line.oldest_step) == (0.75, 2, 3, 4)
    view = read_conversation(theirs, line.episode)
    first, last = (act for act in view.acts if isinstance(act, PolicyTurn))
    assert [message["content"] for message in first.messages] == ["Add.", "12 + 30 ="]
    assert (last.messages[0]["role"], last.text, last.finish_reason) == ("tool", "42", "stop")
    (tool,) = (act for act in view.acts if isinstance(act, ToolAct))
    assert (tool.name, tool.arguments, tool.observation) == ("add", {"a": 12, "b": 30}, "42")
    assert [act.value for act in view.acts if isinstance(act, RewardAct)] == [1.0, -0.25]
    assert view.metrics["reward/length"] == -0.25
    (row,) = episode_tokens(theirs, line.episode).rows
    assert [token.id for token in row.tokens] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 6, 12]
    assert [token.logprob for token in row.tokens if token.loss_mask] == [-0.25, -0.5, -0.125]
    assert {token.version for token in row.tokens if token.loss_mask} == {"qwen-tiny@0.4"}
    assert episodes_with_words(theirs, '"use the tool"') == {f"{'a' * 32}.0", f"{'b' * 32}.0"}


def test_branches_are_rows_and_what_is_not_told_is_said(theirs: RunReader) -> None:
    view = read_conversation(theirs, "b" * 32)
    (told,) = (act.value for act in view.acts if isinstance(act, OtherAct) and act.what == "imported")
    assert set(told["not_told"]) >= {"token ids", "log-probabilities", "versions"}
    rows = {
        (row.seat, row.index, row.row): [token.id for token in row.tokens]
        for row in episode_tokens(theirs, "b" * 32).rows
    }
    assert rows["solver", 0, 1] == [1, 2, 3, 4, 5, 6, 13], "the second branch, from its root"
    assert rows["judge", 0, 0] == []
    assert {agent.seat for agent in view.agents} == {"solver", "judge"}
    failed = theirs.lines([("c" * 32, 0)])[0]
    assert (failed.status, failed.drop_reason, failed.detail) == ("dropped", "ProviderError", "the endpoint said 500")


def test_rollouts_from_before_are_read_as_messages(tmp_path: Path) -> None:
    call = {"id": "c", "function": {"name": "add", "arguments": '{"a": 1}'}}
    completion = [
        {"role": "assistant", "content": "", "tool_calls": [json.dumps(call)]},
        {"role": "tool", "content": "7", "tool_call_id": "c"},
        {"role": "assistant", "content": [{"type": "text", "text": "seven"}, {"type": "image_url"}]},
    ]
    rollout = {"prompt": "1 + 6", "completion": completion, "reward": 1, "example_id": 5, "task": "sums", "answer": "7"}
    found = import_run(lines(tmp_path / "results.jsonl", rollout), "verifiers", tmp_path / "run")
    assert (found.episodes, found.turns, found.not_told["token ids"]) == (1, 2, 1)
    reader = RunReader(tmp_path / "run")
    view = read_conversation(reader, "r1")
    assert [act.text for act in view.acts if isinstance(act, PolicyTurn)] == ["", "seven\n[image_url is not shown]"]
    assert [(act.arguments, act.observation) for act in view.acts if isinstance(act, ToolAct)] == [({"a": 1}, "7")]
    assert (view.summary.task, view.summary.reward) == ("sums-5", 1.0)
    reader.close()


# --- ATIF -------------------------------------------------------------------------------------------------------------


def said(view: ConversationView) -> dict[str, list[Any]]:
    """By agent, what it was told, what it said, what its tools were asked and answered, and with which tokens."""
    found: dict[str, list[Any]] = {}
    speaker = ""
    for act in view.acts:
        if isinstance(act, PolicyTurn):
            speaker = f"{act.seat}[{act.index}]"
            told = [(message["role"], message["content"]) for message in act.messages]
            found.setdefault(speaker, []).append((told, act.text, act.tokens, act.finish_reason, act.versions))
        elif isinstance(act, ToolAct):
            found[speaker].append((act.name, act.arguments, act.observation, act.outcome))
    return found


def test_a_run_comes_back_through_trajectories(sample_run: Path, tmp_path: Path) -> None:
    for run in (sample_run, sample_run / "forks"):
        ours = RunReader(run)
        export(ours, "atif", tmp_path / run.name / "trajectories")
        import_run(tmp_path / run.name / "trajectories", "atif", tmp_path / run.name / "back")
        back = RunReader(tmp_path / run.name / "back")
        assert back.count() == ours.count()
        for key in ours.keys("committed_at != null"):
            before, after = read_conversation(ours, *key), read_conversation(back, f"{key[0]}.{key[1]}")
            assert said(after) == said(before)
            assert after.summary.reward == pytest.approx(before.summary.reward)
            assert (after.task, after.metrics) == (before.task, before.metrics)
            tokens = [
                [[(t.id, t.loss_mask, t.logprob, t.version) for t in row.tokens] for row in found.rows]
                for found in (episode_tokens(ours, *key), episode_tokens(back, f"{key[0]}.{key[1]}"))
            ]
            assert tokens[0] == tokens[1]
        ours.close()
        back.close()


def test_a_trajectory_of_another_tool_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part = trajectory(trajectory_id="helper", agent={"name": "helper", "version": "1", "model_name": "small"})
    trial = tmp_path / "job" / "trial-1" / "agent"
    trial.mkdir(parents=True)
    lines(trial / "trajectory.json", trajectory(session_id="s1", subagent_trajectories=[part]))
    assert main(["run", "import", str(tmp_path / "job"), str(tmp_path / "run"), "--from", "atif"]) == 0
    assert "token ids: not told of 1 episode" in capsys.readouterr().out
    assert main(["episode", "show", str(tmp_path / "run"), "s1"]) == 0
    shown = capsys.readouterr().out
    assert "2 + 2" in shown
    assert "easy" in shown
    assert "token ids not recorded of unknown weights" in shown
    assert "helper[0] · small" in shown


def test_a_prompt_that_was_rewritten_begins_a_row(tmp_path: Path) -> None:
    def step(number: int, prompt: list[int], ids: list[int]) -> dict[str, Any]:
        metrics = {"prompt_token_ids": prompt, "completion_token_ids": ids, "logprobs": [-1.0] * len(ids)}
        return {"step_id": number, "source": "agent", "message": "x", "metrics": metrics}

    steps = [step(1, [1, 2], [3]), step(2, [1, 2, 3, 4], [5]), step(3, [1, 9], [6])]
    import_run(lines(tmp_path / "t.json", trajectory(steps=steps)), "atif", tmp_path / "run")
    reader = RunReader(tmp_path / "run")
    rows = [[token.id for token in row.tokens] for row in episode_tokens(reader, "t").rows]
    assert rows == [[1, 2, 3, 4, 5], [1, 9, 6]]
    reader.close()


def test_a_mark_of_the_byte_order_is_no_part_of_a_file(tmp_path: Path) -> None:
    for name, format, value in (("t.jsonl", "verifiers", episode()), ("t.json", "atif", trajectory())):
        (tmp_path / name).write_text(json.dumps(value), encoding="utf-8-sig")
        assert import_run(tmp_path / name, format, tmp_path / format).episodes == 1
        (tmp_path / name).write_text(json.dumps(value), encoding="utf-16")
        with pytest.raises(InputError, match=f"{name}.*not readable as JSON"):
            import_run(tmp_path / name, format, tmp_path / "other")


def test_an_episode_that_is_called_as_a_fork_would_be_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, run = lines(tmp_path / "traces.jsonl", episode("forks/f0"), episode("forks/f1")), tmp_path / "run"
    import_run(source, "verifiers", run)
    for command in ("show", "tokens", "why", "timeline"):
        assert main(["episode", command, str(run), "forks/f0"]) == 0
        assert "forks/f0" in capsys.readouterr().out
    assert main(["episode", "diff", str(run), "forks/f0", "forks/f1"]) == 0
    reader = RunReader(run)
    told = json.loads(answer_viewer_query(reader, "conversation", {"episode": "forks/f1"}))
    reader.close()
    assert told["summary"]["episode"] == "forks/f1"


# --- hostile ----------------------------------------------------------------------------------------------------------

DEEP = "[" * 5_000 + "]" * 5_000
REFUSED = [
    ("not JSON", "{", "line 2: not readable as JSON"),
    ("NaN", '{"id": "x", "traces": NaN}', "line 2: not readable as JSON"),
    ("out of range", '{"id": "x", "traces": [{"rewards": {"r": {"score": 1e999}}}]}', "line 2: "),
    ("another type", '{"id": 7, "traces": []}', "Expected `str`, got `int`"),
    ("another file", '{"hello": 1}', "no `traces`"),
    ("deep", f'{{"id": "x", "traces": {DEEP}}}', "line 2: "),
    ("deep data", f'{{"id": "x", "traces": [], "task": {{"data": {{"a": {"[" * 80}{"]" * 80}}}}}}}', "deeper than"),
    ("large number", f'{{"id": "x", "traces": [], "task": {{"data": {{"a": {2**70}}}}}}}', "71 bits"),
    ("larger number", f'{{"id": "x", "traces": [], "task": {{"data": {{"a": {"9" * 5000}}}}}}}', "line 2: "),
    ("many values", '{"id": "x", "traces": [' + "[]," * 2_000_000 + "[]]}", "values; at most"),
    ("no id", '{"traces": []}', "no id"),
    ("same id", episode("one"), "already used by another episode"),
    ("long id", episode("x" * 400), "a name of 400 characters"),
    (
        "a message before itself",
        episode("x", traces=[{"nodes": [{"message": {"role": "u"}, "parent": 0}]}]),
        "message 0",
    ),
    ("many objects", '{"id": "x", "traces": [' + "{ }, " * 200_000 + "{}]}", "more than 200,000 objects"),
    ("large argument", episode("x", traces=[saying({"name": "f", "arguments": {"a": 2**70}})]), "71 bits"),
    ("deep argument", episode("x", traces=[saying({"name": "f", "arguments": nested(90)})]), "deeper than"),
    (
        "rewards beyond all sums",
        episode("x", traces=[{"rewards": {"a": {"score": 1e308}, "b": {"score": 1e308}}}]),
        "a reward",
    ),
    ("before all times", episode("x", traces=[{"timing": {"start": -1e308, "agent": {"end": 1.7e308}}}]), "a time"),
    ("large step", episode("x", run={"work": {"policy": {"start": 2**63, "end": 1}}}), "a step that does not exist"),
    ("shared text", episode("x", traces=[branches([{"text": "x" * 1000}, {"text": "y"}])]), "40,000 branches"),
    ("shared call", episode("x", traces=[branches("", {"arguments": "x" * 1000})]), "40,000 branches"),
    ("half a character", '{"id": "\\ud800", "traces": []}', "line 2: "),
]


@pytest.mark.parametrize(("line", "why"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_a_line_that_is_none_is_named_and_nothing_is_left(
    line: Any, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = lines(tmp_path / "traces.jsonl", episode("one"), line)
    assert main(["run", "import", str(source), str(tmp_path / "run"), "--from", "verifiers"]) == 2
    error = capsys.readouterr().err
    assert "traces.jsonl, line 2" in error
    assert why in error
    assert len(error) < 1_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["traces.jsonl"]


def test_bytes_that_are_no_text_and_lines_without_end_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bytes").write_bytes(json.dumps(episode()).encode() + b'\n{"id": "\xff", "traces": []}')
    with pytest.raises(InputError, match=r"line 2: .*utf-8"):
        import_run(tmp_path / "bytes", "verifiers", tmp_path / "run")
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 1 << 20)
    lines(tmp_path / "long", episode(), episode("x" * (2 << 20)))
    with pytest.raises(InputError, match="line 2: longer than 1 MiB"):
        import_run(tmp_path / "long", "verifiers", tmp_path / "run")
    with pytest.raises(InputError, match="not a regular file"):
        import_run(Path("/dev/zero"), "verifiers", tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"schema_version": "ATIF-v9"}, "version 'ATIF-v9'"),
        ({"steps": [{"step_id": 2, "source": "user", "message": "x"}]}, "step 1 has the id 2"),
        ({"steps": [{"step_id": 1, "source": "robot", "message": "x"}]}, "Invalid enum"),
        (
            {"steps": [{"step_id": 1, "source": "agent", "message": "x", "timestamp": "soon"}]},
            "'soon' is not an ISO 8601 time",
        ),
        (
            {
                "steps": [
                    {"step_id": 1, "source": "agent", "message": "x", "metrics": {"completion_token_ids": [2**40]}}
                ]
            },
            "more than 32 bits",
        ),
        ({"agent": {"name": "x" * 999}}, "a name of 999 characters"),
        ({"extra": {"reward_parts": {"terminus[0]": [[2**70, 1.0]]}}}, "a turn that does not exist"),
    ],
)
def test_a_trajectory_that_is_none_is_named(changes: dict[str, Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"t\.json") as refused:
        import_run(lines(tmp_path / "t.json", trajectory(**changes)), "atif", tmp_path / "run")
    assert why in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_ten_megabytes_of_output_come_in_and_are_shown_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = {"results": [{"source_call_id": "c", "content": "\x1b[2J" * 2_500_000}]}
    call = {"tool_call_id": "c", "function_name": "cat", "arguments": {}}
    steps = [
        {"step_id": 1, "source": "agent", "message": "look", "tool_calls": [call], "observation": result},
        {"step_id": 2, "source": "agent", "message": "seen"},
    ]
    import_run(lines(tmp_path / "t.json", trajectory(steps=steps)), "atif", tmp_path / "run")
    for verb in ("show", "why", "tokens", "timeline"):
        assert main(["episode", verb, str(tmp_path / "run"), "t"]) == 0
        shown = capsys.readouterr().out
        assert len(shown) < 200_000
        assert "\x1b[2J" not in shown


def test_what_an_extra_field_may_not_hold_is_left_out(tmp_path: Path) -> None:
    extra = {"metrics": {"large": 10**400, "small": 3}}
    agent = {"name": "a", "extra": {"index": True}}
    import_run(lines(tmp_path / "t.json", trajectory(agent=agent, extra=extra)), "atif", tmp_path / "run")
    reader = RunReader(tmp_path / "run")
    view = reader.episode("t")
    assert (view.metrics, view.problems, view.agents[0].index) == ({"small": 3.0}, [], 0)
    reader.close()


def test_a_place_that_is_taken_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="exists"):
        import_run(TRACES, "verifiers", tmp_path / "run")
    assert not (tmp_path / "elsewhere").exists()
    with pytest.raises(InputError, match="no episode"):
        import_run(lines(tmp_path / "empty"), "verifiers", tmp_path / "other")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.property
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_whatever_stands_anywhere_is_read_or_refused(data: st.DataObject, tmp_path_factory: Any) -> None:
    """A value somewhere in a real file is replaced by any other."""
    format = data.draw(st.sampled_from(["verifiers", "atif"]))
    whole = json.loads(TRACES.read_text().splitlines()[1]) if format == "verifiers" else trajectory(session_id="s")
    at = whole
    while True:
        key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
        if not isinstance(at[key], dict | list) or not at[key] or data.draw(st.booleans()):
            break
        at = at[key]
    at[key] = data.draw(JSON)
    directory = tmp_path_factory.mktemp("any")
    source = lines(directory / ("t.jsonl" if format == "verifiers" else "t.json"), whole)
    try:
        import_run(source, format, directory / "run")
    except InputError:
        assert not (directory / "run").exists()
        return
    reader = RunReader(directory / "run")
    for line in reader.episodes():
        assert read_conversation(reader, line.episode).problems == []
        episode_tokens(reader, line.episode)
    reader.close()
