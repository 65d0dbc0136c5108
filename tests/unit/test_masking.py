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
from agentrl.core.masking import MASK, mask_secrets
from agentrl.journal.run_log import SettingChange
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
    assert mask_secrets({"login": f"{SECRET}!"}) == {"login": f"{SECRET}!"}
    deep: list[Any] = []
    for _ in range(5_000):
        deep = [deep]
    assert MASK in str(mask_secrets(deep))


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
            assert MASK in page or command[1] != "compare"
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
    (tmp_path / "env.py").write_text("import agentrl\nclass Desk(agentrl.ToolEnvironment):\n    pass\n")
    (tmp_path / "run.toml").write_text(
        f'[environment]\nid = "env.py:Desk"\noptions.api_key = "{SECRET}"\n[model]\npath = "models/m"\n[policies.p]\n'
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
    action = ControlAction(0.0, "me", "set", path, SECRET, "new")
    assert SECRET not in action.line
