"""The sandbox of an episode: its files come back on resume and in forks, and nothing runs twice."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

import agentrl
from agentrl.core.errors import EffectError, EntriesError, EpisodeError
from agentrl.core.records import EpisodeSpec, ForkPoint, PolicyVersion, SeatBinding, Task
from agentrl.engines.scripted import ScriptedEngine
from agentrl.journal.entries import JournalEntry, ResourceCallEntry, encode_body
from agentrl.journal.memory import MemoryJournal
from agentrl.rollout.chat.byte_formats import STOP_TOKEN
from agentrl.rollout.sandbox import changed_files
from agentrl.sandbox.state import FileState, content_digest
from agentrl.testing.execution import (
    PARTITION,
    POLICY,
    ExecutedEpisode,
    Failure,
    execute_episode,
    plain_rollout_settings,
    wire_dispatcher,
)
from tests.sandboxes.resume import problems

pytestmark = pytest.mark.needs("bubblewrap")


def spec(environment: type[agentrl.Environment]) -> EpisodeSpec:
    return EpisodeSpec(
        episode_id="e0",
        environment=f"{environment.__module__}:{environment.__qualname__}",
        task=Task(id="t0", data={}),
        seed=1,
        seats={"agent": SeatBinding(POLICY)},
        group_id="g0",
    )


def execute(
    environment: type[agentrl.Environment], recorded: Sequence[JournalEntry] = (), *, fails: bool = False
) -> Any:
    outcome = asyncio.run(execute_episode(environment, spec(environment), lambda *_: [*b"ok", STOP_TOKEN], recorded))
    assert isinstance(outcome, Failure if fails else ExecutedEpisode), outcome
    return outcome.text if isinstance(outcome, Failure) else outcome


def commands(entries: Sequence[JournalEntry]) -> list[ResourceCallEntry]:
    return [body for entry in entries if isinstance(body := entry.decode(), ResourceCallEntry)]


class Counting(agentrl.Environment):
    """Each command appends to a file; what it prints tells how often it ran."""

    limits: ClassVar[agentrl.Sandbox] = agentrl.Sandbox(disk_mb=4)
    seen: ClassVar[list[str]] = []

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        box = ctx.sandbox(self.limits)
        type(self).seen = []
        for _ in range(3):
            ran = await box.run(["sh", "-c", "date +%N >> times; cat times"])
            self.seen.append(ran.output)
            await ctx.agent("agent").act(agentrl.user("next"))
        ctx.agent("agent").reward(float(len(ran.output.splitlines())))


def test_a_replay_returns_recorded_results_and_starts_no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = execute(Counting)
    seen = Counting.seen
    assert whole.header.reward == 3.0
    monkeypatch.setattr("agentrl.rollout.sandbox.open_lease", None)
    again = execute(Counting, whole.entries)
    assert (again.header.reward, Counting.seen) == (3.0, seen)


def test_the_first_new_command_finds_the_recorded_files() -> None:
    whole = execute(Counting)
    for cut in range(1, len(whole.entries)):
        recorded = [command.value["stdout"] for command in commands(whole.entries[:cut])]
        again = execute(Counting, whole.entries[:cut])
        assert again.header.reward == 3.0
        assert Counting.seen[: len(recorded)] == recorded
        assert all(later.startswith(text) for text in recorded for later in Counting.seen[len(recorded) :])


async def fork(entries: Sequence[JournalEntry]) -> Any:
    """Fork an episode of `Counting` before its second command; return the reward."""
    second = [entry.call_id for entry in entries if isinstance(entry.decode(), ResourceCallEntry)][1]
    journal = MemoryJournal()
    engine = ScriptedEngine(lambda *_: [*b"ok", STOP_TOKEN], versions={POLICY: PolicyVersion(POLICY, 0, 0)})
    runner: Any
    _, runner = wire_dispatcher(Counting, engine, journal, plain_rollout_settings(), [])
    log = journal.turn_log(PARTITION)
    for entry in entries:
        log.append(entry)
    await log.flush()
    point = ForkPoint(journal=".", partition=log.name, episode_id="e0", attempt=0, call_id=second)
    forked = replace(spec(Counting), episode_id="f0", fork=point)
    return (await asyncio.get_running_loop().create_task(runner.run(forked, Counting))).reward


def test_a_fork_finds_the_files_of_its_prefix() -> None:
    whole = execute(Counting)
    first, _, third = Counting.seen
    assert asyncio.run(fork(whole.entries)) == 3.0
    assert Counting.seen[0] == first
    assert Counting.seen[2].startswith(first)
    assert Counting.seen[2] != third


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ({"changed": [(b"box", "link", 0o777, 0, 0, b"VICTIM", "")]}, "outside the directories"),
        ({"changed": [(b"etc/passwd", "link", 0o777, 0, 0, b"VICTIM/secret", "")]}, "outside the directories"),
        ({"changed": [(b"box/times", "file", 0o644, 0, 1 << 40, b"", "00")]}, "lacks the content of 'box/times'"),
        ({"changed": [(b"box/times", "file", "0644", 0, 1, b"", "00")]}, "cannot be read"),
        ({"gone": 5}, "cannot be read"),
    ],
)
def test_a_fork_of_a_foreign_run_reaches_no_files_of_this_machine(
    state: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("secret")
    tmp_path.chmod(0o777)
    recorded = list(execute(Counting).entries)
    number = next(at for at, entry in enumerate(recorded) if isinstance(entry.decode(), ResourceCallEntry))
    body = recorded[number].decode()
    assert isinstance(body, ResourceCallEntry)
    changed = [(*row[:5], row[5].replace(b"VICTIM", os.fsencode(tmp_path)), row[6]) for row in state.get("changed", ())]
    hostile = msgspec.structs.replace(body, state={**body.state, **state, "changed": changed})
    recorded[number] = msgspec.structs.replace(recorded[number], body=encode_body(hostile))
    with pytest.raises((EpisodeError, EntriesError), match=problem):
        asyncio.run(fork(recorded))
    assert os.listdir(tmp_path) == ["secret"]


def test_entries_hold_what_changed_and_inputs_only_by_digest() -> None:
    class Writing(agentrl.Environment):
        async def run(self, ctx: agentrl.EpisodeContext) -> None:
            box = ctx.sandbox(agentrl.Sandbox())
            await box.write({"/box/large": b"L" * 100_000, "/box/small": "s"})
            await box.run(["sh", "-c", "cp large copy; echo new > made; rm small"])
            await box.run(["true"])
            await box.run(["sh", "-c", "mv made /tmp/moved; cat - > stdin"], stdin="input")

    entries = execute(Writing).entries
    written, copied, nothing, moved = commands(entries)
    assert sum(len(entry.body) for entry in entries) < 10_000
    digests = {"/box/large": content_digest(b"L" * 100_000), "/box/small": content_digest(b"s")}
    assert written.arguments == [digests]
    assert [row[0] for row in written.state["changed"]] == [b"box/large", b"box/small"]
    assert written.state["contents"] == {}
    assert list(copied.state["contents"].values()) == [b"new\n"]
    assert copied.state["gone"] == [b"box/small"]
    assert nothing.state is None
    assert (moved.state["gone"], moved.state["contents"]) == ([b"box/made"], {})


def test_failures_to_read_and_write_are_remembered() -> None:
    class Failing(agentrl.Environment):
        errors: ClassVar[list[str]] = []

        async def run(self, ctx: agentrl.EpisodeContext) -> None:
            box = ctx.sandbox(agentrl.Sandbox(disk_mb=1))
            type(self).errors = []
            for call in (box.read("/box/none"), box.write({"/box/x": b"x" * 2_000_000})):
                try:
                    await call
                except EffectError as error:
                    self.errors.append(error.error)

    whole = execute(Failing)
    errors = Failing.errors
    assert [error.partition(":")[0] for error in errors] == ["FileNotFoundError", "OSError"]
    execute(Failing, whole.entries)
    assert Failing.errors == errors


def test_what_a_cancelled_command_left_belongs_to_the_next_entry() -> None:
    class Cancelling(agentrl.Environment):
        async def run(self, ctx: agentrl.EpisodeContext) -> None:
            box = ctx.sandbox(agentrl.Sandbox())
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1):
                    await box.run(["sh", "-c", "echo half > half; sleep 60"])
            left = await box.run(["cat", "half"])
            again = await box.run(["cat", "half"])
            assert left.output in ("", "half\n")
            assert left.output == again.output

    whole = execute(Cancelling)
    # Cut after the first command that ended.
    first = next(number for number, entry in enumerate(whole.entries) if isinstance(entry.decode(), ResourceCallEntry))
    execute(Cancelling, whole.entries[: first + 1])


def test_changes_that_were_read_for_a_cancelled_call_are_in_the_next_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    async def cancelled_once(lease: Any, *, everything: bool) -> Any:
        nonlocal calls
        calls += 1
        changed = await changed_files(lease, everything=everything)
        if calls == 2:
            raise asyncio.CancelledError
        return changed

    class Interrupted(agentrl.Environment):
        async def run(self, ctx: agentrl.EpisodeContext) -> None:
            box = ctx.sandbox(agentrl.Sandbox())
            await box.run(["sh", "-c", "echo 1 > one; echo 1 > gone"])
            with suppress(asyncio.CancelledError):
                await box.run(["sh", "-c", "echo 2 > two; rm gone"])
            await box.run(["sh", "-c", "echo 3 > three"])
            async with box.copy():
                await box.run(["sh", "-c", "rm three; echo 4 > four"])

    monkeypatch.setattr("agentrl.rollout.sandbox.changed_files", cancelled_once)
    state = FileState()
    states = [command.state for command in commands(execute(Interrupted).entries)]
    for change in states:
        state.apply(change)
        assert state.digest == change["digest"]
    assert [row[0] for row in states[1]["changed"]] == [b"box/three", b"box/two"]
    assert [change["gone"] for change in states] == [[], [b"box/gone"], [b"box/three"]]


def test_changes_of_a_root_directory_come_back(tmp_path: Path) -> None:
    for name in ("usr", "box", "proc", "dev", "tmp", "etc", "data/old", "data/kept"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (tmp_path / name).symlink_to(f"usr/{name}")
    for name in ("etc/release", "data/old/file", "data/kept/file", "data/gone"):
        (tmp_path / name).write_text(name)
    for path in (tmp_path, *tmp_path.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o777 if path.is_dir() else 0o666)

    class Rooted(agentrl.Environment):
        listed: ClassVar[list[str]] = []
        change = "rm /data/gone; rm -r /data/old; mkdir /data/old; echo 1 > /data/old/new; echo 2 > /etc/release"

        async def run(self, ctx: agentrl.EpisodeContext) -> None:
            box = ctx.sandbox(agentrl.Sandbox(root=str(tmp_path), read=("/usr",)))
            type(self).listed = []
            for script in (self.change, "rm -r /data/kept; echo 3 > /data/kept; rm /data/old/new", "true"):
                changed = await box.run(["sh", "-c", script])
                assert changed.ok, changed.stderr
                listed = await box.run(["sh", "-c", "cd /; find data etc box | sort; cat etc/release data/kept"])
                self.listed.append(listed.output)
            async with box.copy(only=["/data"]) as judge:
                judged = await judge.run(["sh", "-c", "cd /; find data | sort; cat etc/release"])
                self.listed.append(judged.output)

    whole = execute(Rooted)
    listed = Rooted.listed
    assert listed[0].splitlines() == [
        *["box", "data", "data/kept", "data/kept/file", "data/old", "data/old/new", "etc", "etc/release", "2"]
    ]
    assert listed[2].splitlines() == [*["box", "data", "data/kept", "data/old", "etc", "etc/release", "2", "3"]]
    assert listed[3].splitlines() == [*["data", "data/kept", "data/old", "etc/release"]]
    for cut in range(1, len(whole.entries)):
        execute(Rooted, whole.entries[:cut])
        assert Rooted.listed == listed
    assert (tmp_path / "data" / "gone").exists()


def test_with_a_network_the_episode_begins_again() -> None:
    class Open(Counting):
        limits = agentrl.Sandbox(network="open")

    whole = execute(Open)
    assert {command.level for command in commands(whole.entries)} == {"pinned"}
    first = next(number for number, entry in enumerate(whole.entries) if isinstance(entry.decode(), ResourceCallEntry))
    assert "pinned" in execute(Open, whole.entries[: first + 1], fails=True)


def test_a_state_that_fits_no_entry_ends_the_episode_by_name() -> None:
    class Large(agentrl.Environment):
        async def run(self, ctx: agentrl.EpisodeContext) -> None:
            box = ctx.sandbox(agentrl.Sandbox(disk_mb=100))
            await box.run(["sh", "-c", "for i in 1 2; do echo $i > $i; truncate -s 30M $i; done"])

    assert "48 MiB" in execute(Large, fails=True)


def test_files_that_fit_no_entry_together_can_be_copied_and_restored() -> None:
    class Growing(agentrl.Environment):
        async def run(self, ctx: agentrl.EpisodeContext) -> None:
            box = ctx.sandbox(agentrl.Sandbox(disk_mb=100))
            for name in ("one", "two"):
                await box.run(["sh", "-c", "echo $1 > $1; truncate -s 30M $1", "sh", name])
            async with box.copy(only=["/box"]) as judge:
                assert (await judge.run(["wc", "-c", "one", "two"])).output.split()[-2] == "62914560"

    whole = execute(Growing)
    assert len(commands(whole.entries)) == 3
    execute(Growing, whole.entries[:-2])


def test_files_that_no_copy_can_hold_end_the_episode_by_name() -> None:
    class Sparse(agentrl.Environment):
        async def run(self, ctx: agentrl.EpisodeContext) -> None:
            box = ctx.sandbox(agentrl.Sandbox(disk_mb=40))
            for name in ("one", "two", "three"):
                await box.run(["truncate", "-s", "40M", name])
            async with box.copy():
                raise AssertionError("the copy exceeds the disk")

    assert "more than 88 MiB" in execute(Sparse, fails=True)


def test_deep_directories_and_closed_files_are_kept() -> None:
    class Deep(agentrl.Environment):
        async def run(self, ctx: agentrl.EpisodeContext) -> None:
            box = ctx.sandbox(agentrl.Sandbox())
            await box.run(
                ["sh", "-c", "mkdir -p $(printf 'd/%.0s' $(seq 300))e; echo end > file; mv file d/d; chmod 0 d/d/file"]
            )
            found = await box.run(["sh", "-c", "chmod -R u+rw .; cat d/d/file; find . -type d | wc -l"])
            assert found.output == "end\n302\n"

    whole = execute(Deep)
    first = next(number for number, entry in enumerate(whole.entries) if isinstance(entry.decode(), ResourceCallEntry))
    execute(Deep, whole.entries[: first + 1])


def test_kills_lose_no_file() -> None:
    found, kills = problems(3)
    assert kills >= 3
    assert not found
