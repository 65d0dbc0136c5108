"""Names of earlier versions: each is answered with a sentence about what took its place."""

from __future__ import annotations

import contextlib

import pytest
from pydantic import ValidationError

import agentrl
from agentrl.cli.main import main
from agentrl.config import fields
from agentrl.config.fields import PACKAGED, check_function_name
from agentrl.config.load import check_settings_unchanged, recorded_config
from agentrl.config.mistakes import describe_validation_error
from agentrl.config.run import RunConfig
from agentrl.core.custom_functions import Kind, installed_functions
from agentrl.core.errors import ConfigError
from agentrl.core.removed import REMOVED
from agentrl.core.setting_paths import set_value


class Context(agentrl.EpisodeContext):  # type: ignore[misc]
    """A context without methods."""


Context.__abstractmethods__ = frozenset()


def _answer(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Use a name as a user, and return the answer."""
    if name.startswith("agentrl "):
        with contextlib.suppress(SystemExit):
            assert main(name.split()[1:]) == 2
        return capsys.readouterr().err
    if name.startswith("agentrl."):
        *path, attribute = name.split(".")[1:]
        owner = object.__new__(Context) if path else agentrl
        with pytest.raises(AttributeError) as caught:
            getattr(owner, attribute)
        return str(caught.value)
    data: dict[str, object] = {"environment": {"id": "calculator"}}
    set_value(data, name.split("."), 1)
    with pytest.raises(ValidationError) as refused:
        RunConfig.model_validate(data)
    return describe_validation_error(refused.value, RunConfig)


@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_name_is_answered_with_what_took_its_place(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert REMOVED[name] in _answer(name, capsys)
    assert not REMOVED[name].endswith(".")


@pytest.mark.parametrize("name", [name for name in REMOVED if not name.startswith("agentrl")])
def test_a_run_with_a_removed_setting_is_refused(name: str) -> None:
    recorded: dict[str, object] = {}
    set_value(recorded, name.split("."), None)
    with pytest.raises(ConfigError) as refused:
        recorded_config(recorded)
    assert REMOVED[name] in str(refused.value)
    with pytest.raises(ConfigError) as refused:  # a resume
        check_settings_unchanged(recorded, RunConfig.model_construct())
    assert REMOVED[name] in str(refused.value)


def test_other_names_keep_their_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no command" in _answer("agentrl trian", capsys)
    assert "no attribute" in _answer("agentrl.trian", capsys)
    assert "unknown key trian" in _answer("trian", capsys)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in PACKAGED for name in PACKAGED[kind].split()])
def test_a_name_of_a_package_is_answered_with_its_installation(
    kind: Kind, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert installed_functions(kind)[name].startswith("agentrl_algorithms.")
    monkeypatch.setattr(fields, "installed_functions", lambda kind: {})
    with pytest.raises(ValueError, match=f"'{name}' is in episodic-rl-algorithms: .*packages/algorithms"):
        check_function_name(kind, name)
