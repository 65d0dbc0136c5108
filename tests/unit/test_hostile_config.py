"""Configurations from anywhere: each is loaded or refused with one message that names the file and the key."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.main import main
from agentrl.config.load import MAX_BYTES, dump_toml, load
from agentrl.config.run import RunConfig
from agentrl.config.sections import SamplingConfig
from agentrl.core.errors import ConfigError

BASE = '[environment]\nid = "calculator"\n[model]\npath = "somewhere"\n'


def refused(tmp_path: Path, text: str, *overrides: str) -> str:
    file = tmp_path / "run.toml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ConfigError) as caught:
        load(file, overrides)
    message = str(caught.value)
    assert message.startswith("on the command line: " if overrides else f"{file}")
    assert len(message) < 1000
    return message


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x = " + "[" * 50_000, "nested deeper than"),
        ("x = " + "{a=" * 50_000, "nested deeper than"),
        (".".join("a" * 5_000) + " = 1", "nested deeper than"),
        ("[" + ".".join("a" * 5_000) + "]", "nested deeper than"),
        (f"{BASE}[environment.options]\n{'.'.join('a' * 40)} = 1", "nested deeper than"),
        ("steps = " + "9" * 10_000, "too many digits"),
        (f"seed = 0x{'f' * 10_000}\n{BASE}", "seed: a whole number of more than 64 bits"),
        (f"seed = {2**63}\n{BASE}", "seed: a whole number of more than 64 bits"),
        (f"[environment.options]\nx = [1, {2**63}]\n{BASE}", "environment.options.x.1: a whole number of more"),
        (f"[environment.options]\nx = nan\n{BASE}", "environment.options.x: nan"),
        (f"[environment.options]\nx = [2026-01-02]\n{BASE}", "environment.options.x.0: 2026-01-02 is a date or a time"),
        (f"episode_timeout_s = inf\n{BASE}", "episode_timeout_s: inf"),
        (f'directory = "a\\u0000b"\n{BASE}', "directory: text with a character"),
        (BASE.replace("somewhere", "x" * 5_000), "model.path"),
        (BASE.replace("calculator", "x" * 5_000 + ".py:X"), "environment.id"),
        ("\ud800", "is not text in UTF-8"),
        ("#" * (MAX_BYTES + 1), "longer than"),
    ],
)
def test_a_file_that_no_reader_could_hold_is_refused_in_words(tmp_path: Path, text: str, told: str) -> None:
    text = (
        text
        if not text.startswith("[environment.options]")
        else BASE.replace("[model]", f"{text[: -len(BASE)]}[model]")
    )
    assert told in refused(tmp_path, text)


def test_options_are_what_a_resumed_run_receives() -> None:
    settings: dict[str, Any] = {"environment": {"id": "calculator", "options": {"rows": [{"pair": (1, 2)}]}}}
    with pytest.raises(ValueError, match=r"options\['rows'\]\[0\]\['pair'\] is \(1, 2\), of type tuple"):
        RunConfig.model_validate({**settings, "model": {"path": "agentrl.environments:calculator/model"}})


def test_every_whole_number_has_an_upper_bound(tmp_path: Path) -> None:
    schema = RunConfig.model_json_schema()
    sections = {"RunConfig": schema, **schema["$defs"]}
    counts = {
        f"{section}.{name}": value
        for section, held in sections.items()
        for name, choices in held.get("properties", {}).items()
        for value in choices.get("anyOf", [choices])
        if value.get("type") == "integer" and name != "seed"
    }
    assert len(counts) > 20
    assert not [name for name, value in counts.items() if "maximum" not in value and "exclusiveMaximum" not in value]
    assert "engine.slots = 1000000000000: " in refused(tmp_path, BASE, "--engine.slots=1000000000000")


@pytest.mark.parametrize(
    "override",
    ['environment.options={"a": "\\ud800"}', "environment.options.x=NaN", f"environment.options.x={'9' * 4000}"],
)
def test_an_override_is_held_to_the_same(tmp_path: Path, override: str) -> None:
    assert "environment.options" in refused(tmp_path, BASE, override)


@pytest.mark.parametrize("text", ["inf", "nan", "Infinity"])
def test_no_figure_of_a_run_is_infinite(tmp_path: Path, text: str) -> None:
    assert "episode_timeout_s" in refused(tmp_path, BASE, f"episode_timeout_s={text}")
    with pytest.raises(ValueError, match="finite"):
        SamplingConfig(temperature=float("inf"))


def test_a_mark_before_the_text_is_no_mistake(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(b"\xef\xbb\xbf" + BASE.encode())
    assert load(file).environment.id == "calculator"


def test_a_package_that_cannot_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name, body in (("breaks_it", "raise RuntimeError('no')"), ("ends_it", "raise SystemExit(0)")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(body)
        message = refused(tmp_path, BASE.replace("somewhere", f"{name}.inner:model"))
        assert f"the package '{name}.inner' cannot be imported" in message


def test_a_printed_configuration_has_no_escapes_and_is_the_same_when_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    odd = "\\u009b31m\\u202e\\u2066\\u007f\\u200b\\U000e0041\\u001b[2J"
    file.write_text(f'directory = "{odd}"\n' + BASE.replace("[model]", f'options."{odd}" = "{odd}"\n[model]'))
    (tmp_path / "somewhere").mkdir()
    (tmp_path / "somewhere" / "config.json").write_text("{}")
    assert main(["train", str(file), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert all(character == "\n" or character.isprintable() for character in printed)
    assert tomllib.loads(printed) == tomllib.loads(dump_toml(load(file)))
    assert tomllib.loads(printed)["directory"] == "\x9b31m\u202e\u2066\x7f\u200b\U000e0041\x1b[2J"
