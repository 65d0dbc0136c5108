"""Secrets in a configuration reach no screen, export, sink or message; `config.json` keeps them for a resume."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl.app.control import ControlAction
from agentrl.cli.main import main
from agentrl.config.load import check_settings_unchanged
from agentrl.config.run import RunConfig
from agentrl.core.errors import ConfigError
from agentrl.core.masking import MASK, mask_secrets, mask_text
from agentrl.journal.run_log import SettingChange
from agentrl.journal.run_process import RunProcessRecord, read_failure, recording_process_state
from agentrl.journal.store import SqliteJournal
from agentrl.observe.sinks import open_sinks
from tests.journal_cases import write_episode
from tests.sim.small_run import config_for

SECRET = "sk-live-0123456789"
OPTIONS = {
    "api_key": SECRET,
    "githubToken": SECRET,
    "secrets": {"database": [SECRET]},
    "login": SECRET,
    "api_key_env": "MY_KEY",
    "max_tokens": 512,
    "monkey": "banana",
}
WANDB = """
from types import SimpleNamespace
sent = []
def init(**options):
    sent.append(repr(options))
    return SimpleNamespace(define_metric=lambda *arguments, **options: None)
"""
SHOWN = {"api_key_env": "MY_KEY", "max_tokens": 512, "monkey": "banana"}


@pytest.fixture(autouse=True)
def variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DESK_PASSWORD", SECRET)


def config(**options: Any) -> RunConfig:
    return config_for(environment={"id": "shop.py:Shop", "options": OPTIONS | options})


def test_names_and_values_of_variables_tell_a_secret() -> None:
    hidden = {"api_key": MASK, "githubToken": MASK, "secrets": {"database": [MASK]}, "login": MASK}
    assert mask_secrets(OPTIONS) == hidden | SHOWN
    assert mask_secrets(SECRET, "environment.options.login") == MASK, "the value of a variable named as a secret"
    assert mask_secrets({"login": f"{SECRET}!"}) == {"login": f"{MASK}!"}, "also inside a longer text"
    deep: list[Any] = []
    for _ in range(5_000):
        deep = [deep]
    assert MASK in str(mask_secrets(deep))


@pytest.mark.parametrize(
    "name",
    [
        *(
            "authorization",
            "Proxy-Authorization",
            "auth",
            "bearer",
            "pwd",
            "db_pwd",
            "passwd",
            "PGPASSWORD",
            "credential",
            "credentials",
        ),
        *(
            "tokens",
            "authTokens",
            "apikey",
            "apikeys",
            "api_keys",
            "X-Api-Key",
            "secret_key",
            "access_keys",
            "private_key",
            "authtoken",
        ),
        *(
            "secretkey",
            "accesskey",
            "privatekey",
            "dsn",
            "SENTRY_DSN",
            "connection_string",
            "connectionString",
            "client_secret",
            "secret_key_base",
            "API_KEY_2",
        ),
    ],
)
def test_a_secret_is_known_by_its_name(name: str) -> None:
    assert mask_secrets({name: "abc"}) == {name: MASK}
    assert mask_secrets({"options": {name: ["abc"]}}) == {"options": {name: [MASK]}}


def test_a_number_may_be_a_secret() -> None:
    assert mask_secrets({"password": 12345678, "pins": {"secrets": [1.5]}}) == {
        "password": MASK,
        "pins": {"secrets": [MASK]},
    }
    shown = {"password_length": 8, "max_tokens": 512, "tokens": 3, "eos_token": 2, "auth": True, "password": None}
    assert mask_secrets(shown) == shown


@pytest.mark.parametrize(
    "name",
    [
        *("answer_key", "sort_key", "key", "keys", "token_level", "max_token_length", "bos_token"),
        *("eos_token", "pad_token", "image_start_tokens", "additional_special_tokens", "stop_tokens", "token_type"),
        *("tokenizer", "auth_mode", "author", "passage", "monkey", "api_key_env"),
    ],
)
def test_an_ordinary_setting_is_shown(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "container-abc")
    shown = {name: "abc", "image": "container-abc"}
    assert mask_secrets(shown) == shown, "nor is a variable of such a name a secret"


def test_the_working_directory_is_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PWD", "/home/me/project")
    assert mask_text("/home/me/project/env.py") == "/home/me/project/env.py"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://u:sk-1@h/", f"https://u:{MASK}@h/"),
        ("redis://:p@ss@h:6379/0 and http://h:80/@x", f"redis://:{MASK}@h:6379/0 and http://h:80/@x"),
        ("Authorization: Bearer sk-live", f"Authorization: Bearer {MASK}"),
        ("{'authorization': 'Basic dTpw', 'a': 1}", f"{{'authorization': 'Basic {MASK}', 'a': 1}}"),
        ("curl -H 'bearer abcdefg1'", f"curl -H 'bearer {MASK}'"),
        (f"key={SECRET}, again {SECRET}x", f"key={MASK}, again {MASK}x"),
        ("Bearer authentication failed; the bearer of this", "Bearer authentication failed; the bearer of this"),
        ("of a short variable: hunter2", "of a short variable: hunter2"),
    ],
)
def test_secrets_inside_a_text_are_masked(text: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHORT_PASSWORD", "hunter2")
    monkeypatch.setenv("API_KEY", SECRET[:-2])
    assert mask_text(text) == shown
    assert mask_secrets([text]) == [shown]


def test_an_error_in_the_run_directory_shows_no_secret(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=SECRET), recording_process_state(tmp_path):
        raise ValueError(f"401: wrong key {SECRET}")
    assert read_failure(tmp_path).startswith(f"ValueError: 401: wrong key {MASK} (all of it: ")
    RunProcessRecord(fault=f"raised {SECRET}").write(tmp_path)
    assert RunProcessRecord.read(tmp_path).fault == f"raised {MASK}"
    for path in tmp_path.iterdir():
        assert SECRET not in path.read_text()


def test_no_page_message_or_export_of_a_run_shows_a_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    async def write(name: str, config: RunConfig) -> None:
        info = {"name": name, "config": config.model_dump(mode="json")}
        journal = SqliteJournal(tmp_path / "runs" / name / "journal", info=info)
        await write_episode(journal, 1, "desk")
        await journal.close()

    asyncio.run(write("a", config()))
    asyncio.run(write("b", config(login="else", api_key=f"{SECRET}2")))
    for command in (["run", "compare", "a", "b"], ["run", "stats", "a"], ["run", "view", "a", "--once"]):
        for form in ([], ["--json"]):
            assert main([*command, *form]) == 0
            page = capsys.readouterr().out
            assert SECRET not in page
            if command[1] == "compare":
                assert f"{MASK} (1)" in page, "two keys that differ"
                assert f"{MASK} (2)" in page
    from agentrl.inspection.reader import RunReader
    from agentrl.inspection.run_comparison import changed_settings

    reader = RunReader(tmp_path / "runs" / "a")
    settings = changed_settings(reader)
    reader.close()
    assert SECRET not in json.dumps(settings)
    assert settings["environment.options.api_key"] == MASK
    assert settings["environment.options.monkey"] == "banana"


def test_a_dry_run_prints_no_secret(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "env.py").write_text(
        "import agentrl\nclass Desk(agentrl.Environment):\n    async def run(self, ctx):\n        pass\n"
    )
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "run.toml").write_text(
        f'[environment]\nid = "env.py:Desk"\noptions.api_key = "{SECRET}"\n[model]\npath = "model"\n[policies.p]\n'
    )
    for form in ([], ["--json"]):
        assert main(["train", "run.toml", "--dry-run", *form]) == 0
        printed = capsys.readouterr().out
        assert SECRET not in printed
        assert MASK in printed
    assert main(["train", "run.toml", "--dry-run"]) == 0
    (tmp_path / "printed.toml").write_text(capsys.readouterr().out)
    assert main(["train", "printed.toml", "--dry-run"]) == 2, "the mask is no key"
    assert "environment.options.api_key: <secret> stands for a secret" in capsys.readouterr().err


def test_a_printed_configuration_without_secrets_is_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "env.py").write_text(
        "import agentrl\nclass Desk(agentrl.Environment):\n    async def run(self, ctx):\n        pass\n"
    )
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "run.toml").write_text(
        '[environment]\nid = "env.py:Desk"\noptions = {answer_key = "A", key = "id", sort_key = "date"}\n'
        '[model]\npath = "model"\ntemplate_variables = {bos_token = "<s>"}\n[policies.p]\n'
    )
    assert main(["train", "run.toml", "--dry-run"]) == 0
    (tmp_path / "printed.toml").write_text(capsys.readouterr().out)
    assert main(["train", "printed.toml", "--dry-run"]) == 0
    assert capsys.readouterr().out == (tmp_path / "printed.toml").read_text()


def test_no_sink_gets_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)  # put back at the end
    del sys.modules["wandb"]
    open_sinks(["wandb"], tmp_path, config().model_dump(mode="json"))
    (sent,) = importlib.import_module("wandb").sent
    assert MASK in sent
    assert SECRET not in sent


def test_a_changed_secret_is_named_without_its_value() -> None:
    path = ("environment", "options", "api_key")
    assert str(SettingChange(path, SECRET, "new")) == f"environment.options.api_key {MASK!r} → {MASK!r}"
    with pytest.raises(ConfigError, match=r"environment\.options was .*<secret>") as refused:
        check_settings_unchanged(config().model_dump(mode="json"), config(api_key="new"))
    assert SECRET not in str(refused.value)
    assert "(environment.options: its value in config.json)" in str(refused.value), "not --key=<secret>"
    with pytest.raises(ConfigError, match=r"\(--seed=0; environment\.options: its value in config\.json\)"):
        check_settings_unchanged(config().model_dump(mode="json"), config(api_key="new").model_copy(update={"seed": 9}))
    action = ControlAction(0.0, "me", "set", path, SECRET, "new")
    assert SECRET not in action.line
