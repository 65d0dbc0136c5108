"""TOML and overrides: every mistake is answered with the key and what to write instead."""

from __future__ import annotations

import inspect
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from agentrl.app.memory_estimate import with_chosen_token_limits
from agentrl.cli.main import main
from agentrl.config.load import check_settings_unchanged, dump_toml, load, recorded_config, setting_place
from agentrl.config.mistakes import _FOREIGN_NAMES, all_keys
from agentrl.config.run import RunConfig
from agentrl.core.errors import ConfigError
from agentrl.orchestrator.tasks import PassRateCurriculum

BASE = '[environment]\nid = "calculator"\n[model]\npath = "tiny"\n'


def write(directory: Path, text: str = BASE) -> Path:
    path = directory / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_an_override_may_be_a_table_as_a_file_has_it(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('environment.id = "calculator"\n[policies.solver]\n', encoding="utf-8")
    config = load(path, ["--trainer.sharding=none", "--model.path={ no table"])
    assert (config.trainer.sharding, config.model.path) == ("none", "{ no table")


def test_a_function_is_its_name_or_a_table_with_its_arguments(tmp_path: Path) -> None:
    path = write(tmp_path, BASE + '[trainer.loss]\nname = "ppo"\nclip_high = 0.3\nkl = 0.1\n')
    config = load(path, ["credit.advantage=group_mean"])
    assert (config.trainer.loss.options, config.trainer.loss.kl) == ({"clip_high": 0.3}, 0.1)
    assert (config.credit.advantage.name, config.credit.advantage.options) == ("group_mean", {})
    config = load(path, ["credit.advantage={ name = 'pass_at_k', k = 4 }", "trainer.loss.clip_low=0.1"])
    assert (config.credit.advantage.name, config.credit.advantage.options) == ("pass_at_k", {"k": 4})
    assert config.trainer.loss.options == {"clip_high": 0.3, "clip_low": 0.1}
    assert load(write(tmp_path, dump_toml(config))) == config


def test_an_argument_of_a_function_may_differ_on_resume() -> None:
    def made(**loss: Any) -> RunConfig:
        return RunConfig.model_validate(tomllib.loads(BASE) | {"trainer": {"loss": loss}})

    found = check_settings_unchanged(
        made(name="ppo", clip_high=0.3).model_dump(mode="json"), made(name="ppo", clip_low=0.1)
    )
    assert [(each.key, each.before, each.now) for each in found] == [
        ("trainer.loss.clip_low", None, 0.1),
        ("trainer.loss.clip_high", 0.3, None),
    ]


def test_a_policy_that_a_resume_adds_is_to_be_removed(tmp_path: Path) -> None:
    before = load(write(tmp_path, f"{BASE}[policies.a]\n")).model_dump(mode="json")
    with pytest.raises(ConfigError) as refused:
        check_settings_unchanged(before, load(write(tmp_path, f"{BASE}[policies.a]\n[policies.c]\n")))
    assert "policies.c was None and is 'trained'" in str(refused.value)
    assert "Restore the original (remove policies.c)" in str(refused.value)
    assert check_settings_unchanged(before, load(write(tmp_path, f"{BASE}[policies.a]\n"))) == []


def test_steps_by_policy(tmp_path: Path) -> None:
    text = "[policies.a]\nmax_staleness = 0\n[policies.b]\nmax_staleness = 0\n"
    path = write(tmp_path, f"steps = {{ a = 3, b = 5 }}\n{BASE}{text}")
    assert [load(path).steps_of(name) for name in "ab"] == [3, 5]
    assert load(path, ["steps=4"]).steps_of("b") == 4
    for override, message in (
        ("steps={ a = 3 }", "steps: the number for b is missing; the table must have all trained policies: a, b"),
        ("steps.c=1", "steps.c: there is no policy 'c'; the trained ones are: a, b"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            load(path, [override])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps=true", "steps = true: expected a whole number"),
        ('steps="8"', 'steps = "8": expected'),
        ("trainer.loss.kl=true", "trainer.loss.kl = true: expected a number"),
        ("trainer.loss.normalizer=true", "trainer.loss.normalizer = true: expected a whole number"),
        ("environment.selection={ replay = true }", "environment.selection.replay = true: expected a number"),
        ("sampling.temperature=0.005", "sampling.temperature: 0.005 is below 0.01; 0 takes the likeliest token"),
        ("evaluation.sampling.temperature=2.5", "evaluation.sampling.temperature = 2.5: "),
        ("environment.selection={ low = 0.95 }", "low = 0.95 is above high = 0.9"),
        ("environment.selection={ high = 0.05 }", "low = 0.1 is above high = 0.05"),
        ("environment.selection.low='0.1'", "environment.selection.low = \"'0.1'\""),
    ],
)
def test_an_override_that_is_no_number_is_not_taken_for_one(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(write(tmp_path), [override])


def test_an_override_may_be_a_number_as_a_file_has_it(tmp_path: Path) -> None:
    assert load(write(tmp_path), ["steps=1_000"]).steps == 1000


def test_an_override_of_a_policy_that_the_file_lacks_is_refused_with_those_it_has(tmp_path: Path) -> None:
    path = write(tmp_path, f"{BASE}[policies.policy]\n")
    with pytest.raises(ConfigError, match=r"no policy 'solver'.*: policy"):
        load(path, ["--policies.solver.learning_rate=1e-4"])
    seated = ["--policies.other.learning_rate=1e-4", "--seats.first=policy", "--seats.second=other"]
    assert sorted(load(path, seated).policies) == ["other", "policy"]
    frozen = ["--policies.judge.kind=frozen", "--policies.judge.path=weights"]
    assert sorted(load(path, frozen).policies) == ["judge", "policy"]


def test_overrides_change_the_file_and_keep_text_text(tmp_path: Path) -> None:
    overrides = [
        "--trainer.loss.name=ppo",
        "name=12",
        "--policies.solver.lora.rank=4",
        "--environment.options.terms=[2, 4]",
    ]
    config = load(write(tmp_path), overrides)
    assert config.trainer.loss.name == "ppo"
    assert config.name == "12"
    assert list(config.policies) == ["solver"]
    assert config.policies["solver"].lora is not None
    assert config.policies["solver"].lora.rank == 4
    assert config.environment.options == {"terms": [2, 4]}


def test_the_file_of_a_loss_and_of_an_advantage_lies_beside_the_file_that_names_them(tmp_path: Path) -> None:
    (tmp_path / "mine.py").touch()
    config = load(write(tmp_path, BASE), ["trainer.loss.name=mine.py:sapo", "credit.advantage=mine.py:max_rl"])
    assert config.trainer.loss.name == f"{tmp_path.resolve()}/mine.py:sapo"
    assert config.credit.advantage.name == f"{tmp_path.resolve()}/mine.py:max_rl"


def test_a_model_beside_the_file_is_found_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "tiny").mkdir(parents=True)
    (tmp_path / "b" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "b")
    path = write(tmp_path / "a")
    assert load(path).model.path == str((tmp_path / "a" / "tiny").resolve())
    (tmp_path / "a" / "tiny").rmdir()
    assert load(path).model.path == "tiny"


@pytest.mark.parametrize("key", ["sampling.max_tokens", "policies.policy.sampling.max_tokens"])
def test_turns_longer_than_the_contexts_are_refused_by_name_and_recorded_ones_are_read(
    tmp_path: Path, key: str
) -> None:
    path = write(tmp_path)
    with pytest.raises(ConfigError) as refused:
        load(path, [f"{key}=65", "engine.max_context=64"])
    assert str(refused.value).startswith(f"on the command line: {key} = 65 is above engine.max_context = 64")
    config = load(path, [f"{key}=65"])
    data = config.with_token_limits(64, 64).model_dump(mode="json")
    assert recorded_config(data).engine.max_context == 64
    with pytest.raises(ConfigError, match=rf"^{key} = 65 is above engine\.max_context = 64"):
        with_chosen_token_limits(config.with_token_limits(64, 64), {})


def test_names_of_other_libraries_lead_to_settings_that_exist() -> None:
    assert set(_FOREIGN_NAMES.values()) <= set(all_keys(RunConfig))
    assert not _FOREIGN_NAMES.keys() & {key.rpartition(".")[2] for key in all_keys(RunConfig)}


def test_dumped_configuration_loads_as_the_same(tmp_path: Path) -> None:
    text = BASE + '[environment.options]\n"odd name" = "quote \\" \\u007f \\n"\nnested = { a = [1, 2.5, true] }\n'
    config = load(write(tmp_path, text), ["policies.a.lora.alpha=8", "policies.b.kind=frozen", "seats.x=a"])
    assert load(write(tmp_path, dump_toml(config))) == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.los.name=ppo", "unknown key trainer.los; did you mean trainer.loss?"),
        ("trainr.workers=2", "unknown key trainr; did you mean trainer?"),
        ("step_size=3", "unknown key step_size; did you mean policies.<name>.step_size?"),
        ("policies.policy.stepsize=3", "did you mean policies.policy.step_size?"),
        ("policies.policy.lr=1e-4", "did you mean policies.policy.learning_rate?"),
        ("policies.policy.lora.ranks=3", "did you mean policies.policy.lora.rank?"),
        ("trainer.loss.normaliser=64", "trainer.loss: unknown key normaliser; did you mean normalizer?"),
        ("trainer.loss.kl={ k2 = 0.1 }", "expected a number"),
        ("engine.vllm=8", "engine.vllm = 8: expected a table { NAME = a value, ... }"),
        ("trainer.loss.kl=-1", "trainer.loss.kl = -1: expected greater than or equal to 0"),
        ("credit.advantage={ name = 'none', k = 4 }", "credit.advantage: 'none' has no arguments; remove k"),
        ("credit.advantage=4", "credit.advantage = 4: expected a table { name = ... }"),
        ("policies.policy.steps=4", "unknown key policies.policy.steps; did you mean steps?"),
        ("best.policy=policy", "unknown key best.policy"),
        ("best.stop_at=1", "stop_at ends a run by a metric"),
        ("best.stop_a=1", "unknown key best.stop_a; did you mean best.stop_at?"),
        ("credit.release=dynamic_sampling", "expected 'group', 'episode' or 'late'"),
        ("trainer.kind=ray", "unknown key trainer.kind"),
        ("engine.placement=process", "unknown key engine.placement; there are: vllm, replicas"),
        ("engine.silence_timeout_s=1", "unknown key engine.silence_timeout_s"),
        ("environment.tool_timeout_s=1", "unknown key environment.tool_timeout_s"),
        ("trainer.loss.name=sappo", "trainer.loss: 'sappo': there is no such loss; built in are truncated, ppo"),
        ("credit.advantage=maxrr", "credit.advantage: 'maxrr': there is no such advantage; built in are leave_one"),
        ("credit.advantage=GRPO", "'GRPO': there is no such advantage; here it is 'group_std' (docs/reference/algo"),
        ("trainer.loss.name=dr-grpo", "'dr-grpo': there is no such loss; here it is 'ppo' (docs/reference/algo"),
        ("steps=many", 'steps = "many": expected a whole number or a table { NAME = a whole number, ... }'),
        ("evaluation.tasks=all", 'tasks = "all": expected a whole number or a table { NAME = a whole number, ... }'),
        ("steps=0", "steps = 0: expected greater than 0"),
        ("engine.refresh=never", "engine.refresh = \"never\": expected 'auto', 'token', 'token_keep_kv'"),
        (
            "policies.policy.lora=3",
            "policies.policy.lora = 3: expected a table { rank = ..., alpha = ..., ",
        ),
        ("policies.policy.lora.target_modules=7", "expected a list"),
        ("engine.kv_memory=5", "unknown key engine.kv_memory; there are: vllm"),
        ("engine.threads=5", "unknown key engine.threads"),
        ("trainer.optimizer.beta1=0.5", "unknown key trainer.optimizer.beta1"),
        ("engine.refresh=lazy", "Set policies.policy.lora, or set engine.refresh = 'auto', 'token' or 'turn'"),
        ("engine.capture_routing=5", "engine.capture_routing = 5: expected true or false"),
        ("environment.id.x=1", "environment.id.x: environment.id is a value, not a section"),
        ("seats.solver=nobody", "no policy 'nobody'"),
        ("num_generations=8", "unknown key num_generations; did you mean credit.group_size?"),
        ("trainer.max_completion_length=8", "unknown key trainer.max_completion_length; did you mean sampling.max_tok"),
        ("zzzz=1", "unknown key zzzz; there are: name, directory"),
        ("steps", "section.field=value"),
        ("trainer..ranks=1", "section.field=value"),
    ],
)
def test_mistakes_are_named_with_the_mend(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path), [override])
    assert message in str(caught.value)
    assert "Pydantic" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"step": 3}, "RunConfig: unknown key step; did you mean steps?"),
        ({"policies": {"policy": {"lr": 1}}}, "RunConfig: unknown key policies.policy.lr"),
        ({"steps": 0}, "RunConfig: steps = 0: expected "),
    ],
)
def test_mistakes_in_python_are_named_as_in_a_file(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        RunConfig(**{"environment": {"id": "calculator"}, "model": {"path": "x"}, **settings})
    assert str(error.value).startswith(message)
    assert "pydantic" not in str(error.value)
    assert "trained.lr" not in str(error.value)


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path), ["steps=0", "trainr=1", "engine.slots=-1"])
    assert len(str(caught.value).splitlines()) == 3


def test_a_selection_is_checked_with_the_defaults_that_it_gets() -> None:
    defaults = inspect.signature(PassRateCurriculum).parameters
    assert (defaults["low"].default, defaults["high"].default) == (0.1, 0.9), "see the cases of environment.selection"


def test_only_what_does_not_learn_may_take_the_likeliest_token(tmp_path: Path) -> None:
    judge = '[policies.judge]\nkind = "frozen"\nsampling.temperature = 0\n[evaluation]\nsampling.temperature = 0\n'
    config = load(write(tmp_path, f"{BASE}\n{judge}"))
    assert (config.sampling_of("judge").temperature, config.evaluation.sampling.changes) == (0, {"temperature": 0})
    with pytest.raises(ConfigError, match=r"sampling.temperature = 0 of policies.*evaluation.sampling.temperature = 0"):
        load(write(tmp_path), ["sampling.temperature=0"])
    with pytest.raises(ConfigError, match=r"evaluation.sampling.temperature = -1"):
        load(write(tmp_path), ["evaluation.sampling.temperature=-1"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('steps = "8"', 'steps = "8": expected a whole number, without quotes: 8'),
        ("steps = true", "steps = true: expected a whole number"),
        ("steps = 8.5", "steps = 8.5: expected a whole number"),
        ('engine.capture_routing = "yes"', 'engine.capture_routing = "yes": expected true or false: write true'),
        ('policies.a.sampling.temperature = "0.5"', "policies.a.sampling.temperature"),
        ("freeze = [[7, 5]]", "freeze.0.0 = 7: expected text or a list"),
        ("policies = { step_size = 8 }", "policies.step_size: a name is missing: policies.NAME.step_size"),
        ("policies.kind.step_siz = 8", "unknown key policies.kind.step_siz; did you mean policies.kind.step_size?"),
        ("scorers.judge.policy = 'a'", "unknown key scorers.judge.policy"),
        ("scorers.per = 'turn'", "scorers.per: a name is missing: scorers.NAME.per"),
        ("policies.a = 8", "policies.a = 8: expected a table { sampling = ..., model = ..."),
    ],
)
def test_values_are_what_the_file_says(tmp_path: Path, line: str, message: str) -> None:
    """Text is no number, also where it looks like one."""
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, f"{line}\n{BASE}"))
    assert message in str(caught.value)


def test_refresh_is_by_kind_of_policy_unless_it_is_set(tmp_path: Path) -> None:
    mixed = (
        BASE
        + """
    [policies.adapter.lora]
    [policies.full]
    [policies.judge]
    kind = "frozen"
    """
    )
    config = load(write(tmp_path, mixed), [])
    assert {name: config.refresh_of(name) for name in config.policies} == {
        "adapter": "lazy",
        "full": "token",
        "judge": "token",
    }
    assert not config.engine.keep_kv
    for refresh in ("token", "turn"):
        config = load(write(tmp_path, mixed), [f"engine.refresh={refresh}"])
        assert {config.refresh_of(name) for name in config.trained} == {refresh}


def test_kept_kv_is_a_token_refresh(tmp_path: Path) -> None:
    config = load(write(tmp_path), ["engine.refresh=token_keep_kv"])
    assert config.engine.keep_kv
    assert {config.refresh_of(name) for name in config.trained} == {"token"}
    overrides = ["policies.policy.lora.rank=4", "engine.vllm={}"]
    assert not load(write(tmp_path), [*overrides, "engine.refresh=token"]).engine.keep_kv


def test_files_that_are_no_toml_are_told_by_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.toml:2:9"):
        load(write(tmp_path, "seed = 3\nsteps = \n"))
    with pytest.raises(ConfigError, match=r"nothing\.toml"):
        load(tmp_path / "nothing.toml")
    with pytest.raises(ConfigError, match="is a directory; give a TOML file"):
        load(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        load(tmp_path / "binary.toml")
    with pytest.raises(ConfigError, match="environment"):
        load(write(tmp_path, '[model]\npath = "x"\n'))


def test_every_key_but_names_of_the_users_can_be_an_override(tmp_path: Path) -> None:
    """`keys` and the models agree: no key of it is ever called unknown."""
    for key in all_keys(RunConfig):
        message = ""
        try:
            load(write(tmp_path), [f"{key.replace('<name>', 'policy')}=1"])
        except ConfigError as error:
            message = str(error)
        assert "unknown key" not in message or "belongs to" in message, key


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ("deterministic=false", "deterministic"),
        ("policies.policy.step_size=8", "policies.policy.step_size"),
        ("seed=1", "seed"),
        ("policies.policy.learning_rate=2e-5", ""),
    ],
)
def test_a_deterministic_run_is_resumed_with_the_waves_it_had(tmp_path: Path, change: str, refused: str) -> None:
    settings = ["deterministic=true", "policies.policy.max_staleness=0"]
    before = load(write(tmp_path), settings).model_dump(mode="json")
    now = load(write(tmp_path), [*settings, change])
    if not refused:
        assert [each.key for each in check_settings_unchanged(before, now)] == ["policies.policy.learning_rate"]
        return
    with pytest.raises(ConfigError, match=refused):
        check_settings_unchanged(before, now)


def test_on_vllm_all_policies_filter_or_none_does(tmp_path: Path) -> None:
    policies = "[policies.a.sampling]\ntop_p = 0.9\n[policies.a.lora]\n[policies.b.lora]\n[seats]\nx = ['a', 'b']\n"
    path = write(tmp_path, f"{BASE}[engine.vllm]\n{policies}")
    with pytest.raises(ConfigError, match=r"policies\.b"):
        load(path)
    assert load(path, ["policies.b.sampling.top_k=5", "engine.capture_routing=true"]).filtered == ["a", "b"]


def test_release_in_parts_where_nothing_is_compared(tmp_path: Path) -> None:
    load(write(tmp_path), ["credit.release=episode", "credit.advantage=role_mean", "trainer.loss.normalizer=8"])


def test_code_that_does_not_exist_is_named_with_the_line_that_asks_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, 'name = "a"\n[environment]\nid = "envs.py:Sun"\n[model]\npath = "."\n')
    with pytest.raises(ConfigError, match=rf"^{path}:3: environment\.id = .*there is no file envs\.py in {tmp_path}"):
        load(path)
    with pytest.raises(ConfigError, match=rf"^{path}, or the command line: environment\.id"):
        load(path, ["environment.id=nowhere.py:Sun"])
    (tmp_path / "envs.py").write_text("import agentrl\n", encoding="utf-8")
    assert main(["evaluate", str(path)]) == 2
    assert f"{path}:3: environment '{tmp_path}/envs.py:Sun': {tmp_path}/envs.py has no 'Sun'" in capsys.readouterr().err


def test_the_line_of_a_setting_is_found_in_tables_and_dotted_keys(tmp_path: Path) -> None:
    path = write(tmp_path, 'environment.id = "x.py:A"\n\n[trainer.loss]\n# name\nname = "own.py:f"\n')
    assert setting_place(path, "environment.id", "x.py:A") == f"{path}:1"
    assert setting_place(path, "trainer.loss.name", "own.py:f") == f"{path}:5"
    assert setting_place(path, "trainer.loss.name", "other.py:f") == f"{path}, or the command line"
