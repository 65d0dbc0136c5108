"""What a recorded run may choose here: nothing in a run from others, everything that this user's own training chose."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agentrl.journal.run_log import SqliteRunLog
from tests.support import warm
from tests.support.counting_listener import CountingListener

pytestmark = [pytest.mark.e2e, pytest.mark.damages_journal, pytest.mark.timeout(300)]

DECODE, ENCODE = msgspec.msgpack.decode, msgspec.msgpack.encode
MINE = """\
import agentrl
from agentrl.environments.calculator import Calculator


class Mine(Calculator):
    pass


@agentrl.scorer
def short(scored):
    return 1.0


@agentrl.loss
def simple(batch):
    return -batch.advantages * batch.logprobs
"""
CONFIG = """\
name = "demo"
steps = 2
environment.id = "mine.py:Mine"
model.path = "agentrl.environments:calculator/model"
policies.solver = { step_size = 8, max_staleness = 0 }
credit.group_size = 4
sampling = { max_tokens = 24, max_turns = 3 }
engine = { slots = 8, max_context = 192 }
trainer = { loss = { name = "mine.py:simple", normalizer = 16 }, micro_batch_tokens = 4096 }
evaluation.tasks = 0
checkpoint.every = 1
scorers.short = { function = "mine.py:short", credit = "note" }
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that this user trained with an environment, a scorer and a loss of their own."""
    place = tmp_path_factory.mktemp("own")
    (place / "mine.py").write_text(MINE)
    (place / "mine.toml").write_text(CONFIG)
    finished = warm.command(place, "train", "mine.toml")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return place / "runs" / "demo"


class Received:
    """A copy of a run as others could send it: with changed records, whose digests and checksums are right."""

    def __init__(self, own: Path, place: Path, name: str = "received") -> None:
        self.path = place / name
        shutil.copytree(own, self.path, symlinks=True)
        self.mark = place / "code-ran"
        self.code = self.path / "m.py"
        self.code.write_text(
            f"open({str(self.mark)!r}, 'a').close()\n{MINE}\ndef bot(messages, random):\n    return ''\n"
        )

    def rows(self, statement: str, *values: object) -> list[Any]:
        connection = sqlite3.connect(self.path / "journal" / "control.db")
        try:
            with connection:
                return connection.execute(statement, values).fetchall()
        finally:
            connection.close()

    @property
    def episode(self) -> str:
        """The id of an episode with turns."""
        query = "SELECT episode FROM episodes WHERE turns > 0 AND drop_reason IS NULL ORDER BY committed_at LIMIT 1"
        return str(self.rows(query)[0][0])

    def configure(self, change: Callable[[dict[str, Any]], object]) -> None:
        for key, text in self.rows("SELECT key, value FROM meta"):
            info = json.loads(text) if str(text).startswith("{") else {}
            if "config" in info:
                change(info["config"])
                self.rows("UPDATE meta SET value = ? WHERE key = ?", json.dumps(info), key)

    def replace_environment(self, name: str, task: dict[str, Any] | None = None) -> None:
        """Let every episode name another environment, and another task."""
        data = None if task is None else json.dumps(task)
        self.rows("UPDATE admissions SET environment = ?, data = coalesce(?, data)", name, data)
        self.rows("UPDATE episodes SET environment = ?", name)
        for log in (self.path / "journal").glob("turns-*.db"):
            connection = sqlite3.connect(log)
            for number, body in connection.execute("SELECT id, body FROM entries WHERE call = 'begin'").fetchall():
                entry = DECODE(body)
                environment = next(item for item in entry if isinstance(item, str) and ":" in item)
                entry[entry.index(environment)] = name
                if task is not None:
                    data = next(item for item in entry if isinstance(item, dict) and "question" in item)
                    entry[entry.index(data)] = task
                connection.execute("UPDATE entries SET body = ? WHERE id = ?", (ENCODE(entry), number))
            connection.commit()
            connection.close()
        self.sign()

    def sign(self) -> None:
        """Make all digests and checksums right."""
        control = sqlite3.connect(self.path / "journal" / "control.db")
        control.row_factory = sqlite3.Row
        for log in (self.path / "journal").glob("turns-*.db"):
            entries = sqlite3.connect(log)
            digests: dict[tuple[str, int], tuple[bytes, int]] = {}
            rows = entries.execute("SELECT id, episode, attempt, call, asked, body FROM entries ORDER BY id").fetchall()
            for number, episode, attempt, call, asked, body in rows:
                digest = asked.encode() if isinstance(asked, str) else asked or b""
                text = f"{episode}\x1f{attempt}\x1f{call}\x1f{len(digest)}".encode()
                entries.execute(
                    "UPDATE entries SET checksum = ? WHERE id = ?", (zlib.crc32(text + digest + body), number)
                )
                before, count = digests.get((episode, attempt), (b"", 0))
                after = hashlib.blake2b(before + call.encode() + body, digest_size=16).digest()
                digests[episode, attempt] = (after, count + 1)
            entries.commit()
            entries.close()
            for (episode, attempt), (digest, count) in digests.items():
                statement = (
                    "UPDATE episodes SET digest = ?, entries = ? WHERE episode = ? AND attempt = ? AND digest NOT NULL"
                )
                control.execute(statement, (digest, count, episode, attempt))
        tables = [row[0] for row in control.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()]
        for table in tables:
            rows = list(map(dict, control.execute(f"SELECT * FROM {table}").fetchall()))
            if not rows or "checksum" not in rows[0]:
                continue
            control.execute(f"DELETE FROM {table}")
            for row in rows:
                checksum = zlib.crc32(
                    table.encode() + ENCODE([value for key, value in row.items() if key != "checksum"])
                )
                places = ", ".join("?" * len(row))
                control.execute(f"INSERT INTO {table} VALUES ({places})", list({**row, "checksum": checksum}.values()))
        control.commit()
        control.close()

    def command(self, *arguments: str, directory: Path | None = None) -> subprocess.CompletedProcess[str]:
        return warm.command(directory or self.path.parent, *arguments)

    def commands(self) -> dict[str, list[str]]:
        """The commands that re-execute something of the run."""
        run, episode = str(self.path), self.episode
        return {
            "fork": ["episode", "fork", run, episode, "--at", "0"],
            "replay": ["episode", "replay", run, episode],
            "rescore": ["episode", "rescore", run, episode],
            "step replay": ["step", "replay", run, "1"],
        }


@pytest.fixture
def received(own: Path, tmp_path: Path) -> Received:
    return Received(own, tmp_path)


@pytest.fixture
def listener() -> Iterator[CountingListener]:
    listener = CountingListener()
    yield listener
    listener.close()


def allowed(refused: subprocess.CompletedProcess[str]) -> list[str]:
    """The arguments of the command that a refusal has."""
    (command,) = re.findall(r"agentrl ((?:episode|step) .* --.*)$", refused.stderr + refused.stdout, re.MULTILINE)
    return shlex.split(command)


# --- an own run -------------------------------------------------------------------------------------------------------


def test_an_own_run_needs_no_options_and_a_moved_one_needs_them_once(own: Path, tmp_path: Path) -> None:
    moved = Received(own, tmp_path, "moved")
    mine = Received(own, tmp_path, "copy")
    mine.path = own
    for name, command in mine.commands().items():
        finished = mine.command(*command)
        assert finished.returncode == 0, name + finished.stdout + finished.stderr
        assert "not recomputed" not in finished.stdout
    for verb in (["replay"], ["fork", "--at", "-1"]):
        finished = mine.command("episode", verb[0], str(own / "forks"), "f0", *verb[1:])
        assert finished.returncode == 0, "a fork of the own run: " + finished.stdout + finished.stderr
    for name, command in moved.commands().items():
        refusals, finished = 0, moved.command(*command)
        while finished.returncode or "not recomputed" in finished.stdout:
            refusals += 1
            finished = moved.command(*allowed(finished))
        # `fork` asks for its settings and the environment at once; the others use them too, and a step needs the loss.
        assert refusals == {"fork": 1, "step replay": 1}.get(name, 0), name
        again = moved.command(*command)
        assert again.returncode == 0, name + again.stdout + again.stderr
        assert "not recomputed" not in again.stdout


def test_an_own_run_resumes(own: Path) -> None:
    finished = warm.command(own.parent.parent, "train", "mine.toml", "--steps=3", "--resume")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "code_changed" not in finished.stdout + finished.stderr


def test_a_changed_value_of_an_own_run_is_refused(own: Path) -> None:
    changed = Received(own, own.parent, "changed")
    shutil.rmtree(changed.path / "forks", ignore_errors=True)
    finished = changed.command(*changed.commands()["fork"])
    assert finished.returncode == 2
    kept = own.rename(own.with_name("kept"))
    changed.path.rename(own)
    changed.path = own
    try:
        changed.configure(lambda config: config["scorers"]["short"].update(function=f"{own}/m.py:short"))
        finished = changed.command(*changed.commands()["fork"])
        assert finished.returncode == 2
        assert f'scorers.short.function = "{own}/m.py:short"' in finished.stderr
        assert "model.path" not in finished.stderr, "the rest is what the user's training chose"
        assert not changed.mark.exists()
    finally:
        shutil.rmtree(own)
        kept.rename(own)


# --- runs from others -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["policies.evil.id", "scorers.evil.function", "trainer.loss.name"])
def test_a_received_configuration_runs_no_code(received: Received, key: str) -> None:
    def change(config: dict[str, Any]) -> None:
        if key == "policies.evil.id":
            config["policies"]["evil"] = {"kind": "bot", "id": f"{received.code}:bot"}
        elif key == "scorers.evil.function":
            config["scorers"]["evil"] = {"function": f"{received.code}:short"}
        else:
            config["trainer"]["loss"]["name"] = f"{received.code}:simple"

    received.configure(change)
    commands = received.commands()
    finished = received.command(*commands["step replay" if key == "trainer.loss.name" else "fork"])
    assert not received.mark.exists()
    assert f"--{key}={received.code}" in finished.stdout + finished.stderr, "the option that would allow it"


@pytest.mark.parametrize(
    "name",
    ["agentrl.run1", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("environments.run1", "plain"))],
)
def test_a_directory_named_like_a_package_runs_no_code(own: Path, tmp_path: Path, name: str) -> None:
    received = Received(own, tmp_path, name)
    received.replace_environment(f"{name}/m.py:Mine")
    for verb, command in received.commands().items():
        arguments = [argument.replace(str(received.path), name) for argument in command]
        finished = received.command(*arguments)
        assert not received.mark.exists()
        if verb != "step replay":
            assert finished.returncode == 2


def test_an_installed_package_runs_no_code_of_the_working_directory(tmp_path: Path, repository: Path) -> None:
    """As from a wheel, where Python finds no package `environments`."""
    site, work = tmp_path / "site", tmp_path / "work"
    site.mkdir()
    (work / "environments").mkdir(parents=True)
    (site / "agentrl").symlink_to(repository / "agentrl")
    (work / "environments" / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').close()\n{MINE}")
    script = (
        f"import sys; sys.path[:] = [{str(site)!r}] + [p for p in sys.path if p != {str(repository)!r}]\n"
        "from pathlib import Path\n"
        "try:\n"
        "    from agentrl.app.received import ReceivedRun\n"
        "    choose = ReceivedRun(Path('runs/r')).environment\n"
        "    choose('environments.evil:Mine', None, references={}, code_hash='', command='agentrl')\n"
        "except Exception as error:\n"
        "    print(error)\n"
    )
    finished = subprocess.run(
        [sys.executable, "-P", "-c", script], cwd=work, capture_output=True, text=True, check=True
    )
    assert "--environment" in finished.stdout
    assert not (tmp_path / "ran").exists()


SHIPPED: dict[str, dict[str, Any]] = {
    "agentrl_formats.runners:Verifiers": {"python": "{program}", "settings": {}, "task": "0"},
    "agentrl_formats.runners:Inspect": {"python": "{program}", "settings": {}, "task": "0"},
    "agentrl_formats.servers:NemoGym": {"url": "{url}", "file": "{file}", "row": 0},
    "agentrl_formats.servers:OpenEnv": {"url": "{url}", "seed": 1},
    "agentrl_formats.harbor:Harbor": {"directory": "{top}", "task": ".", "roots": {"img": "/."}, "network": "open"},
    "agentrl_formats.gem:Gem": {"id": "game:GuessTheNumber-v0", "seed": 1, "arguments": {}},
    "agentrl_formats.bfcl:Bfcl": {"category": "../../../etc"},
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SHIPPED)
def test_a_received_task_chooses_no_program_and_no_address(
    received: Received, listener: CountingListener, name: str
) -> None:
    program = received.path / "program"
    program.write_text(f"#!/bin/sh\ntouch {received.mark}\n")
    program.chmod(0o755)
    (received.path / "rows.jsonl").write_text('{"responses_create_params": {"input": "hi"}}\n')
    values = {"program": program, "url": f"http://{listener.address}", "file": received.path / "rows.jsonl"}
    values["top"] = received.path
    task = {
        key: value.format(**values) if isinstance(value, str) else value
        for key, value in {**SHIPPED[name], "rewards": {"reward": [0.0, 1.0]}, "failed_reward": 0.0}.items()
    }
    received.replace_environment(name, task)
    shown = received.command("episode", "show", str(received.path), received.episode)
    assert shown.returncode == 0, shown.stderr
    (options,) = {tuple(part for part in allowed(received.command(*received.commands()["fork"])) if "=" in part)}
    for verb in ("fork", "replay", "rescore"):
        finished = received.command(*received.commands()[verb], *options)
        assert finished.returncode == 2, verb
        assert "--task." in finished.stderr, verb
    assert not received.mark.exists()
    assert not listener.seen["connections"]


def test_a_resumed_run_plays_only_environments_of_the_configuration(own: Path, tmp_path: Path) -> None:
    received = Received(own, tmp_path / "runs", "demo")
    shutil.copy(own.parent.parent / "mine.py", tmp_path)
    (tmp_path / "mine.toml").write_text(CONFIG)
    shutil.rmtree(received.path / "forks", ignore_errors=True)
    # An unfinished episode: the first of the next group.
    rows = received.rows("SELECT * FROM admissions WHERE purpose = 'train'")
    row = max(rows, key=lambda row: int(row[0].removeprefix("e")))
    number = int(row[0].removeprefix("e")) + 1
    with contextlib.closing(SqliteRunLog(received.path / "journal")) as log:
        new = {0: f"e{number}", 3: f"{received.code}:Mine", 7: f"g{number}", len(row) - 2: log.next_seq()}
    values = [new.get(place, value) for place, value in enumerate(row)]
    received.rows(f"INSERT INTO admissions VALUES ({', '.join('?' * len(row))})", *values)
    received.sign()
    mine = f"--environment.id={own.parent.parent / 'mine.py'}:Mine"
    finished = warm.command(tmp_path, "train", "mine.toml", "--steps=4", "--resume", mine)
    assert not received.mark.exists()
    assert finished.returncode == 0, finished.stdout + finished.stderr
    rows = received.rows("SELECT drop_reason, detail FROM episodes WHERE episode = ?", f"e{number}")
    assert [(reason, f"{received.code}:Mine" in detail) for reason, detail in rows] == [("code_changed", True)]


def test_a_fork_stays_on_this_machine(received: Received, listener: CountingListener) -> None:
    received.configure(lambda config: config["cluster"].update(address=listener.address))
    received.configure(lambda config: config["sandbox"].update(driver="podman", unproved="accept"))
    received.configure(lambda config: config.update(sinks=["wandb"]))
    received.configure(lambda config: config["engine"].update(vllm={"worker_cls": "evil"}, replicas=3))
    command = received.commands()["fork"]
    refused = received.command(*command)
    assert "cluster" not in refused.stderr
    finished = received.command(*allowed(refused), f"--environment={own_code(received)}")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert not listener.seen["connections"]
    forks = Received.__new__(Received)
    forks.path = received.path / "forks"
    ((text,),) = forks.rows("SELECT value FROM meta WHERE value LIKE '%\"config\"%' ORDER BY key DESC LIMIT 1")
    config = json.loads(text)["config"]
    assert (config["cluster"]["address"], config["engine"]["vllm"], config["engine"]["replicas"]) == ("", None, "auto")
    assert config["sandbox"] == {"driver": "bubblewrap", "unproved": "refuse"}


@pytest.mark.parametrize("kind", ["link", "linked directory", "pipe"])
def test_weights_that_lead_out_of_the_run_are_refused_by_name(own: Path, tmp_path: Path, kind: str) -> None:
    received = Received(own, tmp_path / "runs", "demo")
    for name in ("mine.py", "mine.toml"):
        shutil.copy(own.parent.parent / name, tmp_path)
    weights = max((received.path / "versions").rglob("*.safetensors"))
    if kind == "linked directory":
        weights = weights.parent
        weights.rename(tmp_path / "elsewhere")
        weights.symlink_to(tmp_path / "elsewhere")
    else:
        weights.unlink()
        os.mkfifo(weights) if kind == "pipe" else weights.symlink_to("/etc/passwd")
    for name, command in {**received.commands(), "resume": ["train", "mine.toml", "--resume"]}.items():
        refused = received.command(*command, directory=tmp_path)
        what = "neither a file nor a directory" if kind == "pipe" else "a symbolic link"
        assert f"{weights}: this is {what}" in refused.stderr + refused.stdout, name
        assert refused.returncode == (0 if name == "step replay" else 74), name  # its data needs no weights


def test_a_refusal_keeps_what_the_user_named(received: Received) -> None:
    """So its command works as printed, however many refusals there are."""
    received.configure(lambda config: config["scorers"].update(also=config["scorers"]["short"]))
    command = [*received.commands()["fork"], "-n", "2"]
    options = [word for word in allowed(received.command(*command)) if "=" in word]
    assert len(options) > 1
    code = own_code(received)
    again = allowed(received.command(*command, options[0], "--environment", code))
    assert again == [*command, "--environment", code, *options]
    finished = received.command(*again)
    assert finished.returncode == 0, finished.stderr
    assert [line.split()[1] for line in finished.stdout.splitlines()[1:]] == ["finished", "finished"]


def own_code(received: Received) -> str:
    """The user's own environment: of the configuration that was received with it."""
    ((text,),) = received.rows("SELECT environment FROM admissions LIMIT 1")
    return str(text)


def test_a_received_run_sends_nothing_and_reads_no_variable(
    received: Received, listener: CountingListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_USERS_KEY", "the-users-secret")
    endpoint = {"kind": "remote", "url": f"http://{listener.address}/v1", "model": "m", "api_key_env": "THE_USERS_KEY"}

    def change(config: dict[str, Any]) -> None:
        config["policies"]["evil"] = endpoint
        config["seats"] = {"critic": "evil"}

    received.configure(change)
    said = {name: received.command(*command) for name, command in received.commands().items()}
    assert not listener.seen["connections"]
    for key in ("url", "model", "api_key_env"):
        assert f"policies.evil.{key}" in said["fork"].stderr
    options = [part for part in allowed(said["fork"]) if "api_key_env" not in part]
    own_choices = ["--policies.evil.api_key_env=", f"--environment={own_code(received)}", "--policy=agent=evil"]
    finished = received.command(*options, *own_choices)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert set(listener.tokens) == {None}, "the user's value is used instead of the run's"
