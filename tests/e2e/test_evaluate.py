"""`agentrl.evaluate` and its command: whose weights are served, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
import threading
import warnings
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import agentrl
from agentrl.app.policies import weights_from_directory
from agentrl.cli.main import main
from agentrl.core.errors import InputError
from agentrl.inspection.reader import RunReader
from agentrl.journal.entries import TurnEntry

pytestmark = [pytest.mark.e2e]


class Pair(agentrl.Environment):
    """Two seats, a turn each."""

    seats = ("first", "second")

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        ctx.metric("pairs", 1)
        for seat in self.seats:
            await ctx.agent(seat).act(agentrl.user("1 + 2 ="))
            ctx.agent(seat).reward(0.5)

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        return [agentrl.Task(id=f"{n}", data={}) for n in range(2) if split == "held_out"]


def config_of(base: Path, **sections: object) -> agentrl.RunConfig:
    policies = {"first": {}, "second": {}}
    return agentrl.RunConfig.model_validate(
        {"environment": {"id": "pair"}, "model": {"path": str(base)}, "policies": policies, **sections}
    )


@pytest.fixture
def base(repository: Path) -> Path:
    return repository / "environments" / "calculator" / "model"


@pytest.fixture
def indifferent(base: Path, tmp_path: Path) -> Path:
    """Full weights under which every token is as likely as any other."""
    directory = tmp_path / "indifferent"
    directory.mkdir()
    tensors = load_file(base / "model.safetensors")
    tensors["model.embed_tokens.weight"] = torch.zeros_like(tensors["model.embed_tokens.weight"])
    save_file(tensors, directory / "model.safetensors")
    return directory


def adapter(base: Path, directory: Path) -> Path:
    """An adapter that changes nothing."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    lora = LoraConfig(r=2, target_modules=["q_proj"])
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora).save_pretrained(directory)
    return directory


def turns(journal: Path) -> dict[str, list[TurnEntry]]:
    """The turns of all episodes, by policy."""
    found: dict[str, list[TurnEntry]] = {}
    reader = RunReader(journal)
    for line in reader.episodes():
        for _, entry in reader.episode(line.episode).entries:
            if isinstance(entry, TurnEntry):
                found.setdefault(entry.policy, []).append(entry)
    reader.close()
    return found


def test_each_policy_is_served_from_the_weights_given_for_it(base: Path, indifferent: Path, tmp_path: Path) -> None:
    given = {"first": adapter(base, tmp_path / "adapter"), "second": indifferent}
    scored = agentrl.evaluate(config_of(base), given, environment=Pair, journal=tmp_path / "kept")
    assert scored["evaluation/reward"] == 1.0
    assert scored["evaluation/reward/first"] == scored["evaluation/reward/second"] == 0.5
    said = turns(tmp_path / "kept")
    vocabulary = json.loads((base / "config.json").read_text())["vocab_size"]
    drawn = {name: np.concatenate([turn.sampled().logprobs for turn in own]) for name, own in said.items()}
    for name, own in said.items():
        version = weights_from_directory(name, given[name]).version
        assert {span.version[1:] for turn in own for span in turn.tokens.spans} == {(version.lineage, version.step)}
    assert drawn["second"] == pytest.approx(np.full(len(drawn["second"]), -math.log(vocabulary)), abs=1e-4)
    assert drawn["first"].max() > -1.0, "the adapter's base knows what it says"


def test_metrics_of_an_episode_belong_to_the_first_trained_policy(base: Path, tmp_path: Path) -> None:
    """By name, a frozen policy comes first."""
    config = config_of(base, policies={"first": {"kind": "frozen"}, "second": {}})
    agentrl.evaluate(config, environment=Pair, journal=tmp_path / "kept")
    reader = RunReader(tmp_path / "kept")
    assert set(reader.metrics()["evaluation/metric/pairs"]) == {"second"}
    reader.close()


def test_tasks_may_be_their_number(base: Path) -> None:
    config = config_of(base)
    assert len({episode.task_id for episode in agentrl.evaluate(config, tasks=1, environment=Pair).episodes}) == 1
    with pytest.raises(InputError, match="tasks = 0: expected a list of tasks, or their number"):
        agentrl.evaluate(config, tasks=0, environment=Pair)
    with pytest.raises(InputError, match=r"tasks has str 'first': expected agentrl\.Task objects"):
        agentrl.evaluate(config, tasks=["first"], environment=Pair)  # type: ignore[list-item]


def test_weights_are_refused_before_anything_is_sampled(base: Path, indifferent: Path, tmp_path: Path) -> None:
    config = config_of(base)
    with pytest.raises(InputError, match="NAME=DIR"):
        agentrl.evaluate(config, indifferent, environment=Pair)
    with pytest.raises(InputError, match="third"):
        agentrl.evaluate(config, {"third": indifferent}, environment=Pair)
    with pytest.raises(InputError, match="no weights"):
        agentrl.evaluate(config, {"first": tmp_path}, environment=Pair)
    (tmp_path / "adapter_model.safetensors").touch()
    (tmp_path / "adapter_config.json").write_text('{"r": "many"}')
    with pytest.raises(InputError, match="LoRA"):
        agentrl.evaluate(config, {"first": tmp_path}, environment=Pair)
    save_file({"odd": torch.zeros(1)}, indifferent / "model.safetensors")
    with pytest.raises(InputError, match="second"):
        agentrl.evaluate(config, {"second": indifferent}, environment=Pair)


def test_the_command_takes_one_directory_or_names(
    base: Path, indifferent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(base.parents[2] / "examples" / "01_tool_use.toml", "run.toml")
    given = ["evaluate", "run.toml", "--tasks=2", "--json", "--policy"]
    assert main([*given, "indifferent"]) == 0
    assert main([*given, "solver=indifferent"]) == 0
    capsys.readouterr()
    assert main([*given, "indifferent", "--policy", "solver=indifferent"]) == 2
    assert "write NAME=DIR" in capsys.readouterr().err


class Helped(agentrl.ToolEnvironment):
    """An endpoint that calls a tool, then answers."""

    @agentrl.tool
    def double(self, a: int) -> int:
        """Twice as much."""
        return 2 * a

    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return float(episode.answer == task.data["answer"])

    @classmethod
    def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
        numbers = range(4) if split == "held_out" else range(4, 8)
        return [agentrl.Task(id=f"{n}", data={"question": f"2 * {n}", "answer": str(2 * n)}) for n in numbers]


class Endpoint(BaseHTTPRequestHandler):
    """Doubles with the tool, answers with what it said, and counts its tokens; task 3 it gets wrong."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        *_, last = asked["messages"]
        message: dict[str, object] = {"role": "assistant", "content": last["content"]}
        if last["role"] == "user":
            number = int(last["content"][-1])
            call = {"name": "double", "arguments": json.dumps({"a": number if number < 3 else 0})}
            message |= {"content": None, "tool_calls": [{"id": "c", "type": "function", "function": call}]}
        usage = {"prompt_tokens": 20, "completion_tokens": 5 if last["role"] == "user" else 2}
        body = json.dumps({"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def of_endpoint(tmp_path: Path) -> agentrl.Evaluation:
    """The evaluation of an endpoint, with its run in `tmp_path / "run"`."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Endpoint) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        remote = {"kind": "remote", "url": f"http://127.0.0.1:{server.server_address[1]}/v1", "model": "m"}
        config = agentrl.RunConfig.model_validate({"environment": {"id": "helped"}, "policies": {"teacher": remote}})
        scored = agentrl.evaluate(config, environment=Helped, journal=tmp_path / "run")
        server.shutdown()
    return scored


def test_an_endpoint_is_evaluated_without_a_model_and_its_episodes_come_back(of_endpoint: agentrl.Evaluation) -> None:
    scored = of_endpoint
    assert scored["evaluation/reward"] == 0.75
    assert scored["evaluation/tokens"] == 7, "as the endpoint counts them"
    assert [(episode.task_id, episode.reward, episode.stop_reason, episode.tokens) for episode in scored.episodes] == [
        *((f"{n}", 1.0, "completed", 7) for n in range(3)),
        ("3", 0.0, "completed", 7),
    ]
    asked, called, told, answered = scored.episodes[1].conversation
    assert (asked["role"], asked["content"]) == ("user", "2 * 1")
    call = {"name": "double", "arguments": {"a": 1}}
    assert called == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert (told["role"], told["content"]) == ("tool", "2")
    assert answered == {"role": "assistant", "content": "2"}


@pytest.mark.usefixtures("of_endpoint")
def test_the_reply_of_an_endpoint_is_what_the_environment_read_wherever_it_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = str(tmp_path / "run"), tmp_path / "out.jsonl"
    first, second = agentrl.open_run(run).turns("task = 1")
    call = {"name": "double", "arguments": {"a": 1}}
    assert (first.text, first.content, first.calls) == ("", "", [call])
    assert (second.text, second.content, second.calls) == ("2", "2", [])
    assert main(["run", "export", run, "--to", "jsonl", "--out", str(out)]) == 0
    episodes = [json.loads(line) for line in out.read_text().splitlines()]
    (messages,) = [episode["agents"][0]["rows"][0]["messages"] for episode in episodes if episode["task_id"] == "1"]
    assert messages[1] == {"role": "assistant", "content": "", "tool_calls": [call], "turn": 0}
    assert messages[3] == {"role": "assistant", "content": "2", "turn": 1}
    capsys.readouterr()
    assert main(["episode", "show", run, first.episode]) == 0
    shown = capsys.readouterr().out
    assert 'double({"a": 1})' in shown
    assert "usage" not in shown


def test_episodes_of_trained_policies_come_back_too(base: Path) -> None:
    scored = agentrl.evaluate(config_of(base), environment=Pair)
    assert [episode.task_id for episode in scored.episodes] == ["0", "1"]
    assert list(scored.episodes[0].conversations) == ["first", "second"]
    asked, answered = scored.episodes[0].conversation
    assert asked["content"] == "1 + 2 ="
    assert answered["role"] == "assistant"
    assert scored.episodes[0].tokens > 0
    assert dict(scored).keys() >= {"evaluation/reward", "evaluation/tokens"}


def test_the_command_needs_no_model_where_nobody_samples_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    file.write_text('environment.id = "calculator"\nevaluation.tasks = 3\npolicies.teacher.kind = "bot"\n')
    with file.open("a") as config:
        config.write('policies.teacher.id = "bots.py:seven"\n')
    (tmp_path / "bots.py").write_text("def seven(conversation, random):\n    return '7'\n")
    assert main(["evaluate", str(file), "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["evaluation/episodes"] == 3
    assert "evaluating: starting …" in shown.err
    assert main(["evaluate", str(file), "--json", "--evaluation.tasks={held_out = 3, train = 2}"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["evaluation/episodes"] == 5
    assert {"evaluation/split_reward/held_out", "evaluation/split_reward/train"} <= found.keys()
    file.write_text('environment.id = "calculator"\n')
    assert main(["evaluate", str(file)]) == 2
    assert "model.path" in capsys.readouterr().err


PARTLY_BROKEN = """
import agentrl

class PartlyBroken(agentrl.Environment):
    seats = ("solver",)

    async def run(self, ctx):
        if ctx.task.data["number"] % 4 == 0:
            raise KeyError("answer")
        await ctx.agent("solver").act(agentrl.user("Hello"))
        await ctx.sleep(0.5)
        ctx.agent("solver").reward(1.0)

    @classmethod
    def tasks(cls, split, *, seed=0):
        return [agentrl.Task(id=f"{split}-{number}", data={"number": number}) for number in range(80)]
"""


def test_a_list_with_broken_tasks_is_played_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "partly.py").write_text(PARTLY_BROKEN)
    (tmp_path / "bots.py").write_text("def seven(conversation, random):\n    return '7'\n")
    file = tmp_path / "run.toml"
    file.write_text(
        'environment.id = "partly.py:PartlyBroken"\nevaluation.tasks = 80\nmax_in_flight = 80\n'
        'policies.solver.kind = "bot"\npolicies.solver.id = "bots.py:seven"\n'
    )
    assert main(["evaluate", str(file), "--json"]) == 1
    error = capsys.readouterr().err
    assert "dropped: 20 of 80 episodes" in error
    assert f"KeyError: 'answer' at {tmp_path}/partly.py:9 in run" in error


BROKEN_TOOL = """
import agentrl

class Broken(agentrl.ToolEnvironment):
    @agentrl.tool
    def double(self, a: int) -> int:
        'Twice as much.'
        return self.task.data["factor"] * a

    def reward(self, task, episode):
        return 0.0

    @classmethod
    def tasks(cls, split, *, seed=0):
        return [agentrl.Task(id=f"{split}-{n}", data={"question": f"2 * {n}"}) for n in range(3)]
"""


def test_a_tool_that_fails_in_every_call_is_named_at_the_end_and_by_run_view(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.py").write_text(BROKEN_TOOL)
    with ThreadingHTTPServer(("127.0.0.1", 0), Endpoint) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        Path("run.toml").write_text(
            'environment.id = "broken.py:Broken"\nevaluation.tasks = 3\npolicies.teacher.kind = "remote"\n'
            f'policies.teacher.url = "http://127.0.0.1:{server.server_address[1]}/v1"\npolicies.teacher.model = "m"\n'
        )
        assert main(["evaluate", "run.toml", "--journal", "kept"]) == 0
        server.shutdown()
    words = "tool double failed in all of its 3 calls, most often with KeyError: 'factor' at "
    said = capsys.readouterr().err
    assert f"WARNING always_fails: {words}{tmp_path}/broken.py:8 in double" in said
    assert "fix the tool" in said
    assert main(["run", "view", "kept", "--once"]) == 0
    screen = " ".join(capsys.readouterr().out.split())
    assert words in screen
    assert "broken.py:8 in double" in screen


def test_two_versions_are_compared_task_by_task(
    base: Path, indifferent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(base.parents[2] / "examples" / "01_tool_use.toml", "run.toml")
    given = ["evaluate", "run.toml", "--tasks=4", "--evaluation.attempts=2", "--json"]
    assert main([*given, "--policy", "indifferent", "--against", "base"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["difference/tasks"] == 4.0
    assert found["difference/reward"] == pytest.approx(found["evaluation/reward"] - found["compared/reward"])
    assert {"evaluation/pass_at/1", "evaluation/pass_at/2", "compared/pass_at_error/2"} <= found.keys()
    assert main([*given, "--against", "base"]) == 0
    same = json.loads(capsys.readouterr().out)
    assert same["difference/reward"] == 0.0, "the same weights, tasks and seeds"
    assert same["verdict"] == "undecided"
    assert same["difference/reward_low"] < 0.0 < same["difference/reward_high"]
    Path("kept-compared", "journal").mkdir(parents=True)
    assert main([*given, "--against", "base", "--journal", "kept"]) == 2
    assert "kept-compared, which has a journal" in capsys.readouterr().err
    assert not Path("kept").exists(), "it is refused before the first evaluation"


def test_the_start_of_an_evaluation_names_its_phases(base: Path, tmp_path: Path) -> None:
    """In order, and the engine's again while it lasts."""
    phases: list[tuple[str, str]] = []
    played: list[int] = []

    def on_progress(num_ended: int, episodes: int) -> None:
        played.append(len(phases))

    agentrl.evaluate(
        config_of(base),
        environment=Pair,
        on_phase=lambda phase, part: phases.append((phase, part)),
        on_progress=on_progress,
    )
    names = list(dict.fromkeys(phase for phase, _ in phases))
    assert [name.split()[0] for name in names] == ["loading", "starting"]
    assert any(part for phase, part in phases if phase == names[1])
    assert set(played) == {len(phases)}, "no phase of the start after the first episode"


def test_cut_replies_are_counted_and_code_that_blocks_the_loop_is_named_at_once(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = threading.Event()

    class Blocks(Pair):
        async def run(self, ctx: agentrl.EpisodeContext) -> None:
            assert heard.wait(60), "the warning comes while the loop is blocked"
            await super().run(ctx)

    def show(message: Warning | str, *place: object) -> None:
        if "in run: `assert heard.wait(60)" in str(message):
            heard.set()

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", show)
        metrics = agentrl.evaluate(config_of(base, sampling={"max_tokens": 1}), environment=Blocks)
    assert metrics["evaluation/truncated"] == metrics["evaluation/episodes"] == 2.0
