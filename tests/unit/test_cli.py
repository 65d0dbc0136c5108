"""The command line: output for people and for programs, exit codes, and what it imports."""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from agentrl.cli.commands import EPISODE_COLUMNS, LIVE_SETTINGS
from agentrl.cli.commands import make_parser as _parser
from agentrl.cli.main import main
from agentrl.cli.runs import find_run
from agentrl.config.load import live_settings
from agentrl.config.run import RunConfig
from agentrl.core.text import escape_text
from agentrl.inspection.reader import COLUMNS
from agentrl.journal.store import SqliteJournal
from tests.journal_cases import HOSTILE, write_run
from tests.processes import without_the_rights_of_root
from tests.support.builders import make_spec


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    asyncio.run(write_run(tmp_path / "runs" / "demo"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


async def play_again(journal: Path, episode_id: str) -> None:
    """Admit another attempt of an episode."""
    store = SqliteJournal(journal)
    store.admit(make_spec(episode_id, attempt=1))
    await store.close()


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def write_model(path: Path) -> None:
    path.mkdir()
    (path / "config.json").write_text("{}")


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        for below in action.choices.values() if isinstance(action, argparse._SubParsersAction) else ():
            yield from parsers(below)


def test_every_command_leads_to_a_function_of_the_options() -> None:
    named = [found for parser in parsers(_parser()) if (found := parser.get_default("command")) is not None]
    assert len(set(named)) > 12
    for command in named:
        module, _, function = command.partition(":")
        (options,) = inspect.signature(getattr(import_module(f"agentrl.cli.{module}"), function)).parameters
        assert options == "options", command


def test_json_of_every_reading_command(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run,) = answer(capsys, "run", "list")
    assert (run["name"], run["purpose"], run["episodes"], run["steps"]) == ("demo", "train", 5, {"policy": 2})
    curve = answer(capsys, "run", "curve", "demo")
    assert [(point["step"], point["reward"]) for point in curve] == [(1, 0.5), (2, 2.5)]
    assert answer(capsys, "run", "curve", "demo", "--metric", "loss") == [
        {"policy": "policy", "step": 1, "value": 0.1},
        {"policy": "policy", "step": 2, "value": 0.2},
    ]
    episodes = answer(capsys, "episode", "list", "runs/demo", "--where", "reward > 3", "--limit", "1")
    assert [(line["episode"], line["status"]) for line in episodes] == [("e5", "dropped")]
    view = answer(capsys, "episode", "show", "demo", "e3")
    assert view["summary"]["reward"] == 3.0
    assert [(act["call"], act["kind"]) for act in view["acts"]] == [("r#1", "turn"), ("r#2", "tool"), ("r#3", "reward")]
    assert answer(capsys, "episode", "show", "demo")["summary"]["episode"] == "e5"


def test_an_episode_may_be_named_with_its_attempt(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As warnings of a run name it."""
    asyncio.run(play_again(Path("runs", "demo", "journal"), "e4"))
    for name, attempt in (("e4", 1), ("e4.1", 1), ("e4.0", 0)):
        summary = answer(capsys, "episode", "show", "demo", name)["summary"]
        assert (summary["episode"], summary["attempt"]) == ("e4", attempt)
    assert answer(capsys, "episode", "why", "e3.0")
    assert answer(capsys, "episode", "diff", "demo", "e4.0", "e4.1")["a"]["attempt"] == 0
    for arguments in (["e4.2"], ["e4.1", "--attempt=0"], ["e77.0"]):
        assert main(["episode", "show", "demo", *arguments]) == 2
        assert "no episode 'e" in capsys.readouterr().err


def test_the_newest_run_is_the_one_written_last_though_another_was_read_since(directory: Path) -> None:
    asyncio.run(write_run(Path("runs", "old")))
    for path in Path("runs", "old", "journal").iterdir():
        os.utime(path, (1e9, 1e9))
    for name in ("demo", "old"):  # a reader makes files beside the databases
        main(["run", "view", name])
    assert find_run(None) == Path("runs", "demo")


def test_a_bare_noun_lists(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run"]) == 0
    assert "demo" in capsys.readouterr().out
    assert main(["episode"]) == 0
    assert "e4" in capsys.readouterr().out
    assert main([]) == 0
    assert "episode" in capsys.readouterr().out


def test_text_of_every_reading_command(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["run", "curve"], ["run", "curve", "--metric", "loss"]):
        assert main(arguments) == 0
        assert "step" in capsys.readouterr().out
    assert main(["episode", "list", "demo", "--sort", "reward", "--ascending", "--limit", "2"]) == 0
    assert "2 of 7 episodes" in capsys.readouterr().out
    assert main(["episode", "show", "demo", "e1"]) == 0
    assert "solver[0] · policy" in capsys.readouterr().out
    assert main(["episode", "show", "e1"]) == 0
    assert "solver[0] · policy" in capsys.readouterr().out
    assert main(["--version"]) == 0
    assert re.fullmatch(r"agentrl \d+\.\S+\n", capsys.readouterr().out)


def test_headings_are_columns_that_can_be_filtered_by(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["episode", "list", "demo"]) == 0
    headings = capsys.readouterr().out.splitlines()[0].split()
    assert {"stop_reason", "drop_reason", "oldest_step"} < set(headings) <= set(COLUMNS)
    assert EPISODE_COLUMNS.split(", ") == list(COLUMNS)


@pytest.mark.parametrize("command", ["train", "demo"])
def test_the_help_of_training_shows_that_settings_are_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    named = re.findall(r"--([a-z_.]+)=\S+", capsys.readouterr().out.partition("Each setting is an option:")[2])
    assert {"name", "steps", "seed"} <= set(named)
    assert {name.partition(".")[0] for name in named} <= RunConfig.model_fields.keys()


def test_the_help_lists_the_settings_that_may_change(capsys: pytest.CaptureFixture[str]) -> None:
    assert LIVE_SETTINGS.split(", ") == live_settings()
    with pytest.raises(SystemExit):
        main(["run", "set", "--help"])
    assert LIVE_SETTINGS in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["episode", "list", "nowhere"], 2, "no run nowhere in"),
        (["episode", "list", "demo", "--where", "rewrad < 0"], 2, "did you mean reward"),
        (["episode", "list", "demo", "--limit", "-1"], 2, "--limit and --offset"),
        (["episode", "show", "demo", "e77"], 2, "no episode 'e77'"),
        (["episode", "show", "e77"], 2, "no episode 'e77'"),
        (["episode", "show", "demo2"], 2, "did you mean demo?"),
        (["episode", "show", "demo", "forks/f0"], 2, "no episode 'forks/f0'"),
        (["episode", "show", "n" * 300], 2, "File name too long; choose a shorter name"),
        (["step", "list", "demo", "--policy", "bogus"], 2, "policy 'bogus'; there are: policy"),
        (["run", "curve", "demo", "--metric", "norm"], 2, "did you mean grad_norm?"),
        (["run", "curve", "demo", "--metric", "bogus"], 2, "recorded were: grad_norm, loss"),
        (["run", "list", "--steps=3"], 2, "unknown argument '--steps=3'"),
        (["run", "view", "--onec"], 2, "unknown argument '--onec'; did you mean --once?"),
        (["train", "nothing.toml", "--resmue"], 2, "unknown argument '--resmue'; did you mean --resume?"),
        (["train", "nothing.toml"], 2, "no such file"),
        (["train", "nothing.toml", "more.toml"], 2, "--section.field=value"),
        (["train", "nothing.toml", "--foo"], 2, "a configuration field needs a value: --foo=VALUE"),
        (["train", "nothing.toml", "--steps", "12", "13"], 2, "unknown argument '13'"),
        (["train", "trail.py:Trail"], 2, "give a TOML file, and --environment.id=trail.py:Trail"),
        (["train", "runs"], 2, "runs: is a directory; give a TOML file, such as train.toml"),
        (["train", __file__], 2, "a TOML file is wanted here, such as train.toml"),
        (["run", "list", "nowhere"], 2, "no such directory"),
    ],
)
def test_bad_input_is_one_line_and_its_exit_code(
    directory: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    assert main(arguments) == code
    opening = ["reading", "loading", "examining"]  # what a slow command does is its first line
    (error,) = (line for line in capsys.readouterr().err.splitlines() if line.split()[0] not in opening)
    assert message in error


def test_a_directory_with_a_configuration_is_a_suggestion(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (directory / "trail").mkdir()
    (directory / "trail" / "train.toml").write_text("")
    assert main(["train", "trail"]) == 2
    assert capsys.readouterr().err.endswith("trail: is a directory; did you mean trail/train.toml?\n")


def test_an_override_may_be_written_as_two_arguments(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--name", "typo6", "--dry-run", "--environment.id=calculator", "--model.path", "m"]
    (directory / "train.toml").write_text("")
    write_model(directory / "m")
    assert main(["train", "train.toml", *arguments, "--steps=12", "--json"]) == 0
    config = json.loads(capsys.readouterr().out)
    assert (config["name"], config["steps"], Path(config["model"]["path"]).name) == ("typo6", 12, "m")


@pytest.mark.damages_journal
def test_a_damaged_journal_is_exit_code_74(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (directory / "runs" / "demo" / "journal" / "control.db").write_bytes(b"rubbish" * 1000)
    assert main(["episode", "list", "demo"]) == 74
    assert "control.db" in capsys.readouterr().err


def test_a_journal_that_may_not_be_read_is_not_called_damaged(directory: Path) -> None:
    file = Path("runs", "demo", "journal", "control.db")
    file.chmod(0)
    command = [sys.executable, "-m", "agentrl.cli", "run", "stats", "demo"]
    refused = subprocess.run(
        command, capture_output=True, text=True, check=False, preexec_fn=without_the_rights_of_root
    )
    assert refused.returncode == 74
    assert refused.stderr == f"agentrl: {file}: cannot be read (Permission denied); let your user read it\n"


def test_a_bug_is_exit_code_70_and_its_traceback_is_kept(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(directory))
    monkeypatch.setattr("tempfile.tempdir", None)

    def bug(options: object) -> int:
        raise KeyError("seat")

    monkeypatch.setattr("agentrl.cli.doctor.doctor", bug)
    assert main(["doctor"]) == 70
    error = capsys.readouterr().err
    assert "KeyError" in error
    kept = Path(error.split("The traceback is in ")[1].strip())
    assert "Traceback" in kept.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian", "run.toml"], "there is no command 'trian'; did you mean agentrl train?"),
        (["runs"], "did you mean agentrl run?"),
        (["run", "veiw"], "there is no command 'veiw'; did you mean agentrl run view?"),
        (["view"], "did you mean agentrl run view?"),
        (["env", "chekc"], "did you mean agentrl env check?"),
        (["episode", "xyz"], "there is no command 'xyz'; there are: list, show"),
    ],
)
def test_a_command_that_does_not_exist_is_answered_with_the_nearest(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err


def test_a_number_out_of_range_is_a_usage_error(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["episode", "list", "demo", "--limit", str(2**70)])
    assert "out of range" in capsys.readouterr().err


def test_dry_run_prints_the_resolved_configuration(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.toml").write_text('[environment]\nid = "calculator"\n[model]\npath = "tiny"\n')
    for name in ("tiny", "other"):
        write_model(directory / name)
    assert main(["train", "run.toml", "--steps=7", "--model", "other", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "steps = 7" in text
    assert f'path = "{(directory / "other").resolve()}"' in text
    assert "\nlearning_rate = 1e-05" in text
    assert (
        answer(capsys, "train", "run.toml", "--trainer.loss.name=ppo", "--dry-run")["trainer"]["loss"]["name"] == "ppo"
    )


def test_a_dry_run_refuses_a_model_that_a_start_would_refuse(
    directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(directory / "cache"))
    (directory / "run.toml").write_text('[environment]\nid = "calculator"\n[model]\npath = "models/nothing"\n')
    assert main(["train", "run.toml", "--dry-run"]) == 2
    assert "model.path: there is no directory" in capsys.readouterr().err


def test_a_dry_run_refuses_a_name_that_a_start_refuses(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(directory / "tiny")
    (directory / "run.toml").write_text('[environment]\nid = "calculator"\n[model]\npath = "tiny"\n')
    (directory / "runs" / "taken" / "checkpoints").mkdir(parents=True)
    for more in ([], ["--dry-run"]):
        assert main(["train", "run.toml", "--name=taken", *more]) == 2
        assert "exists; resume it with --resume, choose another --name" in capsys.readouterr().err
    assert main(["train", "run.toml", "--name=free", "--dry-run"]) == 0


def test_a_dry_run_prints_the_warnings_of_a_start(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(directory / "tiny")
    (directory / "run.toml").write_text('[environment]\nid = "calculator"\n[model]\npath = "tiny"\n')
    settings = ["--policies.policy.step_size=20", "--credit.group_size=8", "--policies.policy.max_staleness=1"]
    assert main(["train", "run.toml", "--dry-run", *settings]) == 0
    printed = capsys.readouterr()
    assert "WARNING policies.policy.step_size = 20 is not a multiple" in printed.err
    assert "WARNING" not in printed.out


def test_a_dry_run_refuses_a_directory_that_is_no_model(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.toml").write_text('[environment]\nid = "calculator"\n[model]\npath = "runs"\n')
    assert main(["train", "run.toml", "--dry-run"]) == 2
    assert "model.path: " in (error := capsys.readouterr().err)
    assert "runs: contains no model (config.json is missing)" in error


def test_content_reaches_no_terminal_unescaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = HOSTILE
    asyncio.run(write_run(tmp_path / "runs" / "demo", text=text, name=text))
    path = str(tmp_path / "runs" / "demo")
    commands = [["episode", "list", path], ["episode", "show", path, "e1"], ["run", "list", str(tmp_path / "runs")]]
    commands += [[*command, "--json"] for command in commands]
    commands += [
        ["episode", "show", path, text],
        ["episode", "list", path, "--where", text],
        ["run", "curve", path, "--metric", text],
        *(["run", verb, path] for verb in ("curve", "view", "metrics")),
        ["run", "metrics", path, "--prometheus"],
    ]
    for command in commands:
        main(command)
        output = capsys.readouterr()
        shown = output.out + output.err
        assert escape_text(shown) == shown, command


def in_a_shell(command: str) -> subprocess.CompletedProcess[str]:
    line = command.replace("agentrl", f"'{sys.executable}' -m agentrl.cli")
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=280, check=False)


def test_closed_streams_are_no_bug(directory: Path) -> None:
    for command in ("agentrl run list >&-", "agentrl episode show demo >&-", "agentrl run list 2>&-"):
        done = in_a_shell(command)
        assert (done.returncode, done.stderr) == (0, ""), command
    assert in_a_shell("agentrl run list nowhere 2>&-").returncode == 2


def test_a_reader_that_leaves_ends_a_listing_well_and_a_change_badly(directory: Path) -> None:
    os.mkfifo("gone")  # the first program of the pipe waits until the second has closed it
    for command, code in (("agentrl run list", 0), ("agentrl --help", 0), ("agentrl run export demo --to html", 74)):
        done = in_a_shell(f"{{ read -r _ < gone; {command}; echo $? >&2; }} | {{ exec <&-; echo > gone; }}")
        if code == 0:
            assert done.stderr == "0\n", command
        else:
            assert done.stderr.endswith(f"{code}\n"), command
            assert "output was closed" in done.stderr
