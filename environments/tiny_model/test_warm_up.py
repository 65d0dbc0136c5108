"""What a warm-up learns from: demonstrations that are played, or read from a file; and what it refuses."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

import agentrl
from agentrl.config.load import load
from agentrl.config.run import RunConfig
from agentrl.core.errors import AgentRLError, CheckFailedError, InputError
from agentrl.core.records import Message
from agentrl.core.reply_formats import describe_malformed_call
from agentrl.environments.tiny_model import warm_up as module
from agentrl.environments.tiny_model.__main__ import main
from agentrl.environments.tiny_model.model import train_tokenizer
from agentrl.environments.tiny_model.warm_up import build_tiny_model, format_reply
from agentrl.rollout.chat.chat_format import TemplateChatFormat


class Doubling(agentrl.ToolEnvironment):
    """Double a number with a tool."""

    @agentrl.tool
    def twice(self, number: int) -> int:
        """Twice as much."""
        return 2 * number

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return float(episode.answer == str(2 * task.data["number"]))

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        return [agentrl.Task(id=f"{seed} {n}", data={"question": f"{n}?", "number": n}) for n in range(seed, seed + 3)]


class Shown(Doubling):
    @classmethod
    def demonstrate(cls, task: agentrl.Task, random: Random) -> Iterator[Any]:
        result = yield {"name": "twice", "arguments": {"number": task.data["number"]}}
        yield result


class Listed(Doubling):
    @classmethod
    def demonstrate(cls, task: agentrl.Task, random: Random) -> list[Any]:
        calls = [{"name": "twice", "arguments": {"number": n}} for n in (1, 2)]
        return [calls, str(2 * task.data["number"])]


class Misnamed(Doubling):
    @classmethod
    def demonstrate(cls, task: agentrl.Task, random: Random) -> list[Any]:
        return [{"name": "double", "arguments": {"number": 1}}, "unknown"]


class Silent(Doubling):
    @classmethod
    def demonstrate(cls, task: agentrl.Task, random: Random) -> list[Any]:
        return [{"name": "twice", "arguments": {"number": 1}}]


class Raising(Shown):
    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        raise KeyError("nobody")


class TwoSeats(agentrl.Environment):
    """Each seat is demonstrated in its own words."""

    seats = ("asker", "teller")

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        question = await ctx.agent("asker").act(agentrl.user("Ask."))
        answer = await ctx.agent("teller").act(agentrl.user(question.text))
        ctx.agent("teller").reward(float(answer.text == "it is"))

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        return [agentrl.Task(id="t", data={})]

    @classmethod
    def demonstrate(cls, task: agentrl.Task, random: Random, *, seat: str) -> list[str]:
        return ["is it?"] if seat == "asker" else ["it is"]


def config_of(environment: type) -> RunConfig:
    return RunConfig.model_validate({"environment": {"id": environment.__name__}, "model": {"path": "none"}})


def conversations(environment: type[agentrl.Environment], task: int = 0) -> list[list[tuple[str, str]]]:
    shown, _ = module._shown(environment, environment.tasks("train")[task], 0, 0.0)
    return [[(message.role, message.content) for message in demonstration.messages] for demonstration in shown]


def test_a_generator_is_sent_what_the_environment_answered() -> None:
    call = '<tool_call>{"name":"twice","arguments":{"number":2}}</tool_call>'
    assert conversations(Shown, 2) == [[("user", "2?"), ("assistant", call), ("tool", "4"), ("assistant", "4")]]
    shown, reward = module._shown(Shown, Shown.tasks("train")[2], 0, 0.0)
    assert reward == 1.0
    assert [tool.name for tool in shown[0].tools] == ["twice"]


def test_a_list_may_hold_several_calls_in_a_turn() -> None:
    ((_, (_, calls), *observations, answer),) = conversations(Listed, 1)
    assert calls.count("<tool_call>") == 2
    assert observations == [("tool", "2"), ("tool", "4")]
    assert answer == ("assistant", "2")


class TwoCalls(Doubling):
    @classmethod
    def demonstrate(cls, task: agentrl.Task, random: Random) -> Iterator[Any]:
        first_result = yield {"name": "twice", "arguments": {"number": task.data["number"]}}
        yield {"name": "twice", "arguments": {"number": int(first_result)}}
        yield first_result


def test_some_demonstrations_answer_too_early_with_what_the_last_call_gave() -> None:
    task = agentrl.Task(id="t", data={"question": "3?", "number": 3})
    (early,), _ = module._shown(TwoCalls, task, 0, 1.0)
    assert [message.content for message in early.messages[2:]] == ["6", "6"]
    (demonstration,), _ = module._shown(TwoCalls, task, 0, 0.0)
    assert [message.content for message in demonstration.messages if message.role == "tool"] == ["6", "12"]
    (only,), _ = module._shown(Shown, task, 0, 1.0)
    assert len(only.messages) == 4, "one call is not left out"


def test_every_seat_is_demonstrated_on_its_own() -> None:
    first, second = conversations(TwoSeats)
    assert first == [("user", "Ask."), ("assistant", "is it?")]
    assert second == [("user", "is it?"), ("assistant", "it is")]


class Asked(Doubling):
    @classmethod
    def demonstrate(cls, task: agentrl.Task, random: Random, *, first_message: str) -> Iterator[Any]:
        result = yield {"name": "twice", "arguments": {"number": int(first_message.rstrip("?"))}}
        yield result


def test_a_demonstration_may_read_the_first_message() -> None:
    assert conversations(Asked, 2) == conversations(Shown, 2)


def test_each_pass_asks_for_the_tasks_of_another_seed() -> None:
    demonstrations = iter(module._DemonstrationSource(config_of(Shown), Shown, 0.0))
    questions = [next(demonstrations).messages[0].content for _ in range(7)]
    assert questions == ["0?", "1?", "2?", "1?", "2?", "3?", "2?"]


@pytest.mark.parametrize(
    ("environment", "error", "message"),
    [
        (Doubling, InputError, "Doubling has no demonstrations to learn from: write .*\n\n.*\n.*def demonstrate"),
        (Silent, CheckFailedError, "demonstrate.. of task .* ended after 1 replies, and the environment asked"),
        (Raising, CheckFailedError, "the demonstration of task .* raised KeyError: 'nobody'"),
    ],
)
def test_what_cannot_be_learned_from_is_refused_and_leaves_nothing(
    environment: type, error: type[AgentRLError], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        build_tiny_model(environment, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_exists_is_not_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kept").write_text("mine")
    assert main(["calculator", "--out", str(tmp_path)]) == 2
    assert "exists: give --out a new directory" in capsys.readouterr().err
    assert (tmp_path / "kept").read_text() == "mine"


def test_a_token_never_spans_two_words() -> None:
    pairs = [(hue, beast) for hue in ("red", "blue", "green") for beast in ("dog", "cat", "cow")]
    texts = [f" : secret {hue} {beast} . hint ?" for hue, beast in pairs] * 20
    call = '{"name":"paint","arguments":{"hue":"red","beast":"dog"}}'
    tokenizer = train_tokenizer(iter([*texts, *[call] * 20]), vocabulary=1024)
    tokens = [text.replace("Ġ", " ") for text in tokenizer.encode(texts[0]).tokens]
    assert tokens == [" :", " secret", " red", " dog", " .", " hint", " ?"]
    assert tokenizer.encode(call).tokens == [
        *('{"name":"paint","arguments":{', '"hue":"', "red", '","beast":"', "dog", '"}}')
    ]
    odd = "Ünïcode – 12 €\n\t x_y"
    assert tokenizer.decode(tokenizer.encode(odd).ids) == odd


@pytest.mark.parametrize(
    ("demonstrated", "on_training_tasks", "explanation"),
    [
        (1.0, 0.9, "it memorized them: there are 12"),
        (1.0, 0.1, "it has not learned the demonstrations: raise --steps"),
        (None, 0.9, "it memorized them"),
    ],
)
def test_a_flat_held_out_reward_is_explained(
    demonstrated: float | None, on_training_tasks: float, explanation: str
) -> None:
    text = module.explain_flat_reward(0.0, 0.0, demonstrated, on_training_tasks=on_training_tasks, tasks=12)
    assert explanation in text


def test_a_short_list_that_every_seed_repeats_is_named_at_the_start(tmp_path: Path) -> None:
    parts: list[str] = []
    config = RunConfig.model_validate({"environment": {"id": "unused"}, "model": {"path": "unused"}})
    assert "every seed has the same training tasks (1)" in module.fixed_list(config, TwoSeats)
    assert module.fixed_list(config, Doubling) == "", "they depend on the seed"
    (tmp_path / "shown.py").write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
    build_tiny_model(f"{tmp_path / 'shown.py'}:TwoSeats", tmp_path / "out", steps=1, on_progress=parts.append)
    assert "the model memorizes so short a list" in parts[1]


def test_demonstrations_that_earn_nothing_are_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(CheckFailedError, match="no tool 'double'"):
        build_tiny_model(Misnamed, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_warm_up_that_taught_nothing_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "shown.py").write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
    assert main([f"{tmp_path / 'shown.py'}:TwoSeats", "--out", str(tmp_path / "out"), "--steps=1"]) == 0
    printed = capsys.readouterr()
    assert "did not rise: on training tasks it earns 0.000, so it has not learned" in printed.out
    assert printed.err.startswith("The held-out reward usually stays low until the loss is small. ")
    assert "The warm-up ends when this reward reaches its goal, or after 1 step." in printed.err


def test_ctrl_c_keeps_the_model(tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")

    def interrupt(part: str) -> None:
        if part.startswith("step 2 of"):
            raise KeyboardInterrupt

    result = build_tiny_model(f"{tmp_path / 'shown.py'}:TwoSeats", tmp_path / "out", steps=5, on_progress=interrupt)
    assert result.steps == 2
    assert "every seed has the same training tasks (1), and the model memorizes" in result.explanation
    assert {"train.toml", "model.safetensors"} <= {path.name for path in result.path.iterdir()}


@pytest.mark.slow
def test_a_signal_keeps_the_model_even_if_it_was_ignored(tmp_path: Path) -> None:
    """A shell ignores SIGINT for its jobs in the background; those inherit that, also under nohup."""
    (tmp_path / "shown.py").write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
    out = tmp_path / "out"
    arguments = [f"{tmp_path / 'shown.py'}:TwoSeats", f"--out={out}", "--steps=100000", "--until=1000"]
    command = [sys.executable, "-m", "agentrl.environments.tiny_model", *arguments]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    ) as process:
        try:
            wait_until(out.exists, process)  # the first measurement has ended
            assert {path.name for path in out.iterdir()} >= {"train.toml", "README.md", "model.safetensors"}
            process.send_signal(signal.SIGINT)
            process.send_signal(signal.SIGTERM)  # as `timeout` sends one to a process and to its group
            printed, errors = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 0, errors
    steps = re.search(r"(\d+) training steps", printed)
    assert steps is not None, printed
    assert int(steps[1]) >= module.MEASURED_EVERY
    assert "interrupted: the model is that of its last step" in printed
    assert f"in {steps[1]} steps" in (out / "README.md").read_text()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == ["out", "shown.py"]


def wait_until(holds: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    while not holds():
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
            pytest.fail(str(process.communicate()))


def test_a_model_is_in_place_from_its_first_measurement_on(tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
    parts: list[str] = []

    class Killed(Exception):
        pass

    def kill(part: str) -> None:
        parts.append(part)
        if part.startswith(f"step {2 * module.MEASURED_EVERY + 1} of"):
            raise Killed

    with pytest.raises(Killed):
        build_tiny_model(f"{tmp_path / 'shown.py'}:TwoSeats", tmp_path / "out", steps=60, until=1000, on_progress=kill)
    assert f"in {2 * module.MEASURED_EVERY} steps" in (tmp_path / "out" / "README.md").read_text()
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith(".")]
    assert re.match(r"step 1 of at most 60, loss \d\.\d{3}, held-out reward 0\.00 before training, goal ", parts[3])
    assert re.match(r"step 39 of at most 60, .* at step 20, goal \d+\.00$", parts[-4])


def test_a_directory_that_another_program_makes_meanwhile_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
    out = tmp_path / "out"

    def make(part: str) -> None:
        if part.startswith("step 1 of"):
            out.mkdir()
            (out / "README.md").write_text("mine")

    with pytest.raises(InputError, match="another program has made it since"):
        build_tiny_model(f"{tmp_path / 'shown.py'}:TwoSeats", out, steps=2, on_progress=make)
    assert [path.name for path in out.iterdir()] == ["README.md"]
    assert (out / "README.md").read_text() == "mine"


def test_progress_after_the_goal_names_the_last_step_and_contradicts_nothing() -> None:
    progress = module._Progress(600, 0.0, 0.43, step=120, loss=0.2)
    progress.record(0.45)
    progress.step = 140
    progress.record(0.38)
    progress.step = 141
    assert progress.line == (
        "step 141 of 150, loss 0.200, held-out reward 0.38 at step 140; the goal 0.43 was reached at step 120"
    )
    assert module._Progress(130, 0.0, 0.43, step=125, reached_at=120).line.startswith("step 125 of 129,")


def test_errors_of_tools_fit_the_context(tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
    result = build_tiny_model(f"{tmp_path / 'shown.py'}:Shown", tmp_path / "out", steps=1)
    config = load(result.path / "train.toml")
    chat = TemplateChatFormat.load(result.path)
    written = '{"name" 7}'
    error = Message(role="tool", content=f"error: {describe_malformed_call(written)}")
    prompt = chat.start([agentrl.user("2?")], [tool.spec for tool in Doubling.tool_table().values()])
    length = len(prompt) + config.sampling.max_turns * len(chat.extend([error], after="stop"))
    assert length + 2 * config.sampling.max_tokens <= config.engine.max_context


def test_ctrl_c_before_training_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_demonstrated_reward", interrupt)
    (tmp_path / "shown.py").write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
    assert main([f"{tmp_path / 'shown.py'}:TwoSeats", "--out", str(tmp_path / "out")]) == 130
    assert "interrupted" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir() if path.is_dir() and path.name != "__pycache__"] == []


def test_a_goal_that_was_not_reached_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = module.TinyModelResult(
        path=tmp_path,
        demonstrated=0.5,
        before=0.0,
        reward=0.2,
        goal=0.4,
        steps=9,
        parameters=1,
        vocabulary=1,
        explanation="",
        interrupted=False,
    )
    monkeypatch.setattr("agentrl.environments.tiny_model.__main__.build_tiny_model", lambda *args, **settings: result)
    assert main(["calculator", "--out", str(tmp_path / "out"), "--steps=9"]) == 0
    assert "did not reach its goal" in capsys.readouterr().out
    assert main(["calculator", "--out", str(tmp_path / "out"), "--steps=10"]) == 0
    assert "did not reach its goal" not in capsys.readouterr().out


@pytest.mark.parametrize("reply", [{"name": "f"}, {"arguments": {}}, 7, [{"name": "f", "arguments": 3}], [7]])
def test_a_reply_that_is_none_is_refused(reply: Any) -> None:
    with pytest.raises(InputError, match="a reply is text, a call as"):
        format_reply(reply)


def test_conversations_are_read_from_a_file(tmp_path: Path) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "twice", "arguments": '{"number": 3}'}}
    messages = [
        {"role": "user", "content": "3?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "6", "tool_call_id": "c"},
        {"role": "assistant", "content": "6"},
        {"role": "user", "content": "nobody answers this"},
    ]
    file = tmp_path / "shown.jsonl"
    file.write_text(json.dumps({"messages": messages}) + "\n\n")
    (shown,) = module._read(file, Doubling)
    assert [message.role for message in shown.messages] == ["user", "assistant", "tool", "assistant"]
    assert shown.messages[1].content == '<tool_call>{"name":"twice","arguments":{"number":3}}</tool_call>'
    assert [tool.name for tool in shown.tools] == ["twice"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"shown.jsonl:2: .*\(JSONDecodeError"),
        ("[]", "not a conversation"),
        ('{"messages": []}', "not a conversation"),
        ('{"messages": [{"role": "assistant", "content": "7"}]}', "it must begin with"),
        ('{"messages": [{"role": "user", "content": [7]}]}', "content of list"),
        ("[" * 100_000, "not a conversation"),
    ],
)
def test_a_line_that_is_no_conversation_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "shown.jsonl"
    good = {"messages": [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "2"}]}
    file.write_text(f"{json.dumps(good)}\n{line}\n")
    with pytest.raises(InputError, match=message):
        module._read(file, Doubling)


def test_a_long_line_that_is_no_conversation_is_not_quoted_whole(tmp_path: Path) -> None:
    path = tmp_path / "shown.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "r" * 500_000, "content": "x"}]}))
    with pytest.raises(InputError, match="not a conversation") as refused:
        module._read(path, Doubling)
    assert len(str(refused.value)) < 1000


def test_a_file_without_conversations_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(InputError, match="contains no conversation"):
        module._read(tmp_path / "empty.jsonl", Doubling)
    with pytest.raises(InputError, match="cannot be read"):
        module._read(tmp_path / "none.jsonl", Doubling)
