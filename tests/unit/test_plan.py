"""The plan of a run: what follows from a configuration, and the part of each process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentrl.app import resume, training
from agentrl.app.plan import resolve
from agentrl.app.policies import rollout_settings
from agentrl.app.training import schedule_lines
from agentrl.cli.main import main
from agentrl.config.load import changed_config, check_settings_unchanged
from agentrl.config.plans import plan_data, plan_from_data
from agentrl.config.run import RunConfig
from agentrl.core.errors import ConfigError
from agentrl.core.setting_paths import set_value
from agentrl.rollout.chat.byte_formats import PlainChatFormat
from agentrl.rollout.episode import PolicySettings
from tests.sim.small_run import Ask, config_for
from tests.support.sample_run import sample_run_config, write_sample_run

POLICIES: dict[str, Any] = {
    "guesser": {"step_size": 24, "lora": {"rank": 4, "target_modules": ["q_proj"]}, "sampling": {"max_tokens": 9}},
    "past": {"kind": "past", "of": "guesser"},
    "frozen": {"kind": "frozen", "model": "other"},
    "remote": {"kind": "remote", "url": "http://127.0.0.1:1/v1", "model": "large", "max_concurrent": 9},
    "bot": {"kind": "bot", "id": "bots:call"},
}


def test_the_plan_names_who_plays_what_a_group_brings_and_what_computes() -> None:
    lines = list(resolve(config_for(policies={"guesser": {"step_size": 24, "lora": {}}}), Ask).lines())
    assert lines == [
        "policy guesser: trained, plays guesser, Guess.guesser; 8 turns of up to 64 tokens",
        "group: 4 episodes with 12 units of guesser",
        f"engine of {Path.cwd().name}/unused: embedded, 64 slots, 4 adapters, refresh lazy",
        "trainer: 1 rank, 4 steps of guesser",
    ]


def test_a_dry_run_prints_the_plan_and_refuses_what_the_plan_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = "import agentrl\nclass Desk(agentrl.Environment):\n    async def run(self, ctx):\n        pass\n"
    (tmp_path / "env.py").write_text(source)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "run.toml").write_text(
        '[environment]\nid = "env.py:Desk"\n[model]\npath = "model"\n[policies.p]\nlora = {}\n'
    )
    assert main(["train", "run.toml", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "\n# policy p: trained, plays agent; 8 turns of up to 64 tokens\n" in printed
    assert "\n# group: 8 episodes with 8 units of p\n" in printed
    assert main(["train", "run.toml", "--dry-run", "--json"]) == 0
    assert "trainer: 1 rank, 40 steps of p" in json.loads(capsys.readouterr().out)["plan"]
    assert main(["train", "run.toml", "--dry-run", "--max_in_flight=3"]) == ConfigError.exit_code
    assert "no group could start" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "vllm", "lora", "reason"),
    [
        ({"text_config": {"num_experts": 4}}, True, {}, ": without a GPU vLLM serves no adapters"),
        ({"num_experts": 4}, True, {}, ": without a GPU vLLM serves no adapters of a mixture of experts"),
        ({"num_experts": 4}, True, {"merge": True}, ""),
        ({"num_experts": None, "num_local_experts": 0}, True, {}, ""),
        ({"num_experts": 4}, False, {}, ""),
        (None, True, {}, ""),
    ],
)
def test_adapters_of_mixtures_need_an_engine_that_serves_them(
    tmp_path: Path, settings: dict[str, Any] | None, vllm: bool, lora: dict[str, bool], reason: str
) -> None:
    if settings is not None:
        (tmp_path / "config.json").write_text(json.dumps(settings))
    model, engine = {"path": str(tmp_path)}, {"vllm": {} if vllm else False}
    config = config_for(policies={"guesser": {"step_size": 24, "lora": lora}}, model=model, engine=engine)
    if not reason:
        resolve(config, Ask)
        return
    with pytest.raises(ConfigError, match=rf"policies\.guesser\.lora{reason}"):
        resolve(config, Ask)


def test_a_worker_receives_its_part_of_the_plan_unchanged() -> None:
    scorers = {"helpful": {"function": "mine.py:helpful", "options": {"scale": 2.0}, "per": "episode"}}
    config = config_for(policies=POLICIES, scorers=scorers, workers=3, model={"path": "main"})
    plan = config.rollout_plan
    received = plan_from_data(json.loads(json.dumps(plan_data(plan))))
    assert received == plan
    assert received.external["remote"] == config.policies["remote"].model_copy(update={"max_concurrent": 3})
    assert [base.path for base in received.bases] == [str(Path("main").resolve()), str(Path("other").resolve())]
    assert received.scored == {"guesser"}


def test_the_settings_that_are_recorded_are_those_that_engine_and_environment_get() -> None:
    config = config_for(sampling={"temperature": 0.5, "top_k": 3, "max_tokens": 7, "max_turns": 2})
    seat = rollout_settings(config.rollout_plan, PlainChatFormat(), 99).seat
    policy = PolicySettings(chat_format=PlainChatFormat(), seat=seat)
    assert msgspec.structs.asdict(seat) == {
        **config.sampling.model_dump(include={"temperature", "top_k", "top_p", "min_p", "max_tokens", "max_turns"}),
        "max_context": 99,
    }
    assert (policy.sampling.temperature, policy.sampling.top_k, policy.sampling.max_tokens) == (0.5, 3, 7)
    assert policy.sampling.stop_token_ids == PlainChatFormat().stop_token_ids
    assert (policy.limits.max_turns, policy.limits.max_tokens, policy.limits.max_context) == (2, 7, 99)
    shorter = policy.as_recorded(msgspec.structs.replace(seat, temperature=1.0, max_context=500))
    assert (shorter.sampling.temperature, shorter.limits.max_context) == (1.0, 99), "the engine holds no more"


def test_a_resume_reads_the_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_sample_run(tmp_path).path
    reopened: list[Path] = []
    original = resume.reopen_run

    def counted(config: RunConfig, run: Path, *arguments: Any) -> resume.ReopenedRun:
        reopened.append(run)
        return original(config, run, *arguments)

    monkeypatch.setattr(resume, "reopen_run", counted)
    monkeypatch.setattr(training, "reopen_run", counted)
    (tmp_path / "env.py").write_text("from tests.support.sample_environment import Propose\n")
    settings = sample_run_config(tmp_path, path.name).model_dump(mode="json", exclude_unset=True)
    settings["environment"] = {"id": f"{tmp_path / 'env.py'}:Propose"}
    file = tmp_path / "run.toml"
    from agentrl.config.load import dump_toml

    file.write_text(dump_toml(RunConfig(**settings)))
    main(["train", str(file), "--resume"])
    assert reopened == [path]


def test_a_setting_is_set_inside_tables_alone() -> None:
    data: dict[str, Any] = {"a": 1}
    set_value(data, ("b", "c"), 2)
    assert data == {"a": 1, "b": {"c": 2}}
    for path in (("a", "b"), ()):
        with pytest.raises(ConfigError):
            set_value(data, path, 3)
    with pytest.raises(ConfigError, match=r"seed.x: seed is a value"):
        changed_config(config_for(), ("seed", "x"), 1)


def test_a_resume_with_more_steps_names_both_learning_rates() -> None:
    optimizer = {"optimizer": {"final_learning_rate_share": 0.1}}
    policies = {"guesser": {"learning_rate": 1e-3, "lora": {}}}
    before, now = (config_for(policies=policies, trainer=optimizer, steps=steps) for steps in (10, 20))
    plan = resolve(now, Ask)
    changes = check_settings_unchanged(before.model_dump(mode="json"), now)
    (line,) = schedule_lines(plan, changes, {"guesser": 9})
    assert line.startswith("steps was 10 and is 20, where the schedule of the learning rate ends")
    assert line.endswith("the learning rate of step 10 of guesser is 0.00055 instead of 0.0001")
    constant = resolve(config_for(policies=policies, steps=20), Ask)
    assert list(schedule_lines(constant, changes, {"guesser": 9})) == []
