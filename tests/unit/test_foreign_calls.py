"""A call in a form that the run does not read is named, counted and answered as malformed; an answer is left alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

import agentrl
from agentrl.core.records import ToolSpec
from agentrl.core.reply_formats import MAX_CALL_CHARACTERS, REPLY_FORMATS, find_foreign_call
from agentrl.journal.entries import ToolEntry, TurnEntry
from agentrl.observe.alarms import find_alarms
from agentrl.observe.metrics import broken_turns
from agentrl.observe.run_state import RunDisplaySettings, RunState
from tests.foreign_replies import FOREIGN, PLAIN, QWEN, TOOLS
from tests.reply_samples import CALLS, WEATHER
from tests.support.cpu_time import least_cpu_s
from tests.unit.episodes import play

READ = "hermes"


def form_of(text: str, read: str = READ, tools: tuple[ToolSpec, ...] = TOOLS) -> str:
    call = find_foreign_call(text, tools, read)
    return "" if call is None else call.form


@pytest.mark.parametrize(("text", "reply_format", "calls"), [row[1:] for row in FOREIGN])
def test_a_call_in_another_form_is_named(text: str, reply_format: str, calls: tuple[Any, ...]) -> None:
    call = find_foreign_call(text, TOOLS, READ)
    assert call is not None
    assert (call.form, call.arguments) == (reply_format, text)
    assert "write it as <tool_call>" in call.problem
    assert form_of(text, read=reply_format) == "", "the run reads it"
    read = REPLY_FORMATS[reply_format].read(text, None, TOOLS).tool_calls
    assert [(each.name, each.arguments) for each in read] == [*calls]


@pytest.mark.parametrize("text", PLAIN)
def test_an_answer_is_not_accused(text: str) -> None:
    assert form_of(text) == ""


SHOWN = (
    'I used\n```\nsearch(query="x")\n```\nFinal answer: Paris',
    'Final answer: 7. A call looks like\n```json\n{"name": "search", "arguments": {"query": "x"}}\n```\nHope it helps.',
    "To see them, type\n```\nlist_files()\n```\nThe final answer is 42.",
)


@pytest.mark.parametrize("text", SHOWN)
def test_a_call_that_an_answer_only_shows_is_no_call(text: str) -> None:
    assert form_of(text) == ""
    for reader in ("json", "python"):
        assert REPLY_FORMATS[reader].read(text, None, TOOLS).tool_calls == ()


@pytest.mark.parametrize(
    "schema", [{"enum": None}, {"enum": 3}, {"anyOf": None}, {"type": [{}]}, {"type": {"a": 1}}, None, 5]
)
@pytest.mark.parametrize(
    "text",
    [
        '{"name": "look", "arguments": {"properties": 1}}',
        "<tool_call><function=look><parameter=a>1</parameter></function></tool_call>",
        '<minimax:tool_call><invoke name="look"><parameter name="a">1</parameter></invoke></minimax:tool_call>',
    ],
)
def test_a_tool_may_have_any_schema(text: str, schema: object) -> None:
    for parameters in (
        {"properties": schema},
        {"properties": {"a": schema}},
        {"properties": {"a": 1}, "$defs": schema},
    ):
        form_of(text, tools=(ToolSpec(name="look", description="", parameters=parameters),))


@pytest.mark.parametrize("name", sorted(REPLY_FORMATS))
def test_every_form_is_recognized_by_a_run_that_reads_another(name: str) -> None:
    read = "glm45" if name == "hermes" else READ
    found = form_of(CALLS[name], read, (WEATHER,))
    assert REPLY_FORMATS[found].read(CALLS[name], None, [WEATHER]).tool_calls


def test_a_real_model_is_named_as_often_as_it_calls() -> None:
    assert [form_of(text) for text, _ in QWEN] == [form for _, form in QWEN]
    assert sum(form == "json" for _, form in QWEN) == 20
    for text, form in QWEN:
        read = REPLY_FORMATS["json"].read(text, None, TOOLS).tool_calls
        assert [call.name for call in read] == ["calculate"] * bool(form)


def test_only_offered_tools_and_whole_calls_count() -> None:
    call = '{"name": "calculate", "arguments": {"a": 3}}'
    assert form_of(call) == "json"
    assert form_of(call, tools=TOOLS[1:]) == ""
    assert form_of(call[:-2]) == ""
    assert form_of(call + " " * MAX_CALL_CHARACTERS) == ""


def test_a_malformed_call_of_the_runs_format_is_named_if_another_reads_it() -> None:
    text = "<tool_call>\n<function=list_files>\n</function>\n</tool_call>"
    assert REPLY_FORMATS[READ].read(text, None, TOOLS).tool_calls[0].name == ""
    assert form_of(text) == "qwen3_coder"


def test_the_answers_of_a_healthy_run_cost_microseconds() -> None:
    answer = "The numbers add up to the sum that was asked for. " * 20

    def look() -> None:
        for _ in range(1000):
            find_foreign_call(answer, TOOLS, READ)

    assert least_cpu_s(look, enough=0.1) < 0.1


@pytest.mark.parametrize("piece", ["```json\n", "```\n", "{", '[\n{"name":', '{"name": "calculate", ', "calculate(a=["])
def test_the_time_is_linear_in_the_length(piece: str) -> None:
    text = "calculate" + piece * (MAX_CALL_CHARACTERS // len(piece) - 2)
    assert least_cpu_s(lambda: form_of(text), enough=1.0) < 1.0, "quadratic, it takes minutes"


class Summing(agentrl.ToolEnvironment):
    """Adds two numbers."""

    @agentrl.tool
    def calculate(self, a: int, op: str, b: int) -> int:
        """Calculate."""
        return a + b

    def prompt(self, task: agentrl.Task) -> str:
        return "?"

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return float(episode.answer == "7")


BARE = '{"name": "calculate", "arguments": {"a": 3, "op": "+", "b": 4}}'


def test_the_policy_is_told_and_may_write_the_call_again() -> None:
    played = play(Summing, [f"```json\n{BARE}\n```", f"<tool_call>{BARE}</tool_call>", "7"])
    turns = [entry for entry in played.entries if isinstance(entry, TurnEntry)]
    refused, answered = [entry for entry in played.entries if isinstance(entry, ToolEntry)]
    assert turns[0].reply is not None
    assert [call["form"] for call in turns[0].reply.calls] == ["json"]
    assert (refused.outcome, answered.outcome, answered.observation) == ("bad_arguments", "ok", "7")
    assert "write it as <tool_call>" in refused.observation
    assert played.header.reward == 1.0
    assert played.metrics["foreign_calls/json"] == 1.0
    assert broken_turns(played.metrics) == 1.0, "the refused call and its form count once"


class Reader(agentrl.Environment):
    """Offers a tool, and reads the text of the reply itself."""

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        agent = ctx.agent("agent", tools=TOOLS)
        turn = await agent.act(agentrl.user("?"))
        agent.reward(float(json.loads(turn.text)["arguments"]["b"]))

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        return [agentrl.Task(id=split, data={})]


def test_an_environment_that_reads_the_text_still_gets_it() -> None:
    played = play(Reader, [BARE])
    assert played.header.reward == 4.0
    assert broken_turns(played.metrics) == played.metrics["foreign_calls/json"] == 1.0


STEP = {"reward/mean": 0.0, "episodes/turns": 1.0, "format/episodes": 24.0, "format/broken_turns": 20 / 24}


def alarms(values: dict[str, float], step: int = 1) -> list[Any]:
    state = RunState(plan=RunDisplaySettings())
    state.record("solver", step, values)
    return find_alarms(state)


def test_the_first_step_names_the_form_and_how_to_read_it() -> None:
    no_signal = {"advantage/zero_share": 1.0, "step/units": 24.0}
    (alarm,) = alarms({**STEP, **no_signal, "foreign_calls/json": 18 / 24, "foreign_calls/python": 2 / 24})
    assert alarm.name == "foreign_calls"
    assert "20 of 24 replies hold a call" in alarm.text
    assert "18 as json" in alarm.text
    assert "2 as python" in alarm.text
    assert "model.reply_format = 'json'" in alarm.advice


def test_the_evaluation_before_training_says_it_too() -> None:
    values = {"evaluation/turns": 1.5, "evaluation/episodes": 10.0, "evaluation/foreign_calls/json": 0.8}
    (alarm,) = alarms(values, step=0)
    assert "8 of 15 replies" in alarm.text


def test_few_of_them_raise_nothing() -> None:
    healthy = {**STEP, "format/broken_turns": 0.05, "reward/mean": 0.5}
    assert "foreign_calls" not in [alarm.name for alarm in alarms({**healthy, "foreign_calls/json": 0.05})]


def test_an_unknown_form_in_a_received_run_is_shown_as_it_is() -> None:
    (alarm,) = alarms({**STEP, "foreign_calls/x": 0.5})
    assert "12 as x" in alarm.text
