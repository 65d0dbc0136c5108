"""Expert routing beside the journal: the trainer gets what the engine recorded, or the turn is counted and told; names
in a journal lead to no other directory, and what a prune removes is gone."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tracemalloc
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from agentrl.core.records import EpisodeDataLocation, TrajectoryCredit, Unit
from agentrl.core.tokens import ExpertRouting, RoutingReference, TrainingSample, TrajectoryRow
from agentrl.credit.samples import unit_samples
from agentrl.journal.entries import EntryBody, JournalEntry, TurnEntry, encode_body
from agentrl.journal.memory import MemoryJournal
from agentrl.journal.routing import HostRoutingStore, RoutingStore, decode_routing, move_routing
from agentrl.journal.rows import assemble_trajectories, make_unit_reader
from agentrl.journal.store import SqliteJournal
from tests.journal_cases import write_run
from tests.unit.test_journal_rows import BEGIN, turn
from tests.unit.test_pruning import prune, rule

LAYERS, TOP_K, TURNS = 3, 2, 3


def turns(experts: int) -> list[TurnEntry]:
    """Turns of four new and two sampled tokens; the second recomputes two positions, through other experts."""
    random, entries = np.random.default_rng(0), []
    for number, (start, stop) in enumerate([(0, 5), (3, 11), (11, 17)]):
        rows = random.integers(0, experts, (stop - start, LAYERS, TOP_K), np.min_scalar_type(experts - 1))
        context = [10 * number + token for token in range(4)]
        entries.append(turn(number, context, [1, 2], experts=ExpertRouting(rows, start), parent_context=6 * number))
    return entries


def unit(count: int) -> Unit:
    credit = TrajectoryCredit("solver", 0, 1.0, 0.5, 0.5)
    location = EpisodeDataLocation("turns-w0.db", count)
    return Unit(episode_id="e0", attempt=0, policy="policy", location=location, credits=(credit,))


def written(run: Path, experts: int = 300, change: Callable[[TurnEntry], TurnEntry] = lambda entry: entry) -> Path:
    """A run with one episode of `turns`; returns the directory of its routing."""

    async def main() -> None:
        journal = SqliteJournal(run / "journal")
        log = journal.turn_log("w0")
        log.append(JournalEntry("e0", 0, "begin", b"", encode_body(BEGIN)))
        for number, entry in enumerate(turns(experts)):
            moved = change(move_routing(entry, log, "e0", 0))
            log.append(JournalEntry("e0", 0, f"r#{number}", b"", encode_body(moved)))
        await log.flush()
        await journal.close()

    asyncio.run(main())
    return run / "journal/routing"


def read(run: Path) -> TrajectoryRow:
    ((trajectory,),) = make_unit_reader(run)([unit(TURNS + 1)])
    (row,) = trajectory.rows
    return row


def inline(experts: int, numbers: Sequence[int] = range(TURNS)) -> TrajectoryRow:
    """The row of a journal whose entries hold the routing, of some turns."""
    bodies: list[EntryBody] = [BEGIN]
    for number, entry in enumerate(turns(experts)):
        logprobs = {"logprobs": entry.tokens.columns["logprobs"]}
        tokens = entry.tokens if number in numbers else msgspec.structs.replace(entry.tokens, columns=logprobs)
        bodies.append(msgspec.structs.replace(entry, tokens=tokens))
    (trajectory,) = assemble_trajectories(
        JournalEntry("e0", 0, f"r#{number}", b"", encode_body(body)) for number, body in enumerate(bodies)
    )
    return trajectory.rows[0]


def file_of(routing: Path, number: int) -> Path:
    """The file of a turn; files are named by their digests."""
    content = turns(300)[number].tokens.columns["experts"]
    (folder,) = routing.iterdir()
    return folder / hashlib.sha256(content).hexdigest()


def same(left: TrajectoryRow, right: TrajectoryRow) -> bool:
    assert left.experts is not None
    assert right.experts is not None
    return (
        np.array_equal(left.experts.rows, right.experts.rows)
        and left.experts.start == right.experts.start
        and left.experts.restarts == right.experts.restarts
    )


@pytest.mark.parametrize("experts", [128, 300])
def test_rows_have_the_routing_as_it_was_recorded_and_entries_do_not(tmp_path: Path, experts: int) -> None:
    routing = written(tmp_path, experts)
    row = read(tmp_path)
    assert same(row, inline(experts))
    assert row.experts is not None
    assert row.experts.rows.dtype == (np.uint8 if experts == 128 else np.uint16)
    assert (row.lost_routing, row.recorded_routing) == (0, ())
    files = sorted(file for folder in routing.iterdir() for file in folder.iterdir())
    assert len(files) == TURNS
    partition = (tmp_path / "journal/turns-w0.db").read_bytes()
    assert not any(file.read_bytes()[-40:] in partition for file in files)


def test_a_journal_in_memory_keeps_routing_in_its_entries() -> None:
    (entry, *_) = turns(128)
    assert move_routing(entry, MemoryJournal().turn_log("w0"), "e0", 0) is entry


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def _another(file: Path) -> None:
    file.write_bytes(bytes(len(file.read_bytes())))


def _link(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to("elsewhere")


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize("damage", [Path.unlink, _cut, _another, _link, _pipe])
def test_a_lost_file_costs_the_replay_of_its_turn_and_is_told_once(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    routing = written(tmp_path)
    damage(file_of(routing, 0))
    damage(file_of(routing, 2))
    with pytest.warns(UserWarning, match=r"episode e0, solver\[0\], turn 0: .* is lost: .*routing/") as told:
        row = read(tmp_path)
    assert len(told) == 1
    assert row.lost_routing == 2
    assert same(row, inline(300, [1]))
    samples = samples_of(tmp_path)
    assert sum(sample.lost_routing for sample in samples) == 2
    assert sum(int(sample.loss_mask.sum()) for sample in samples) == 2 * TURNS, "a token was lost with the routing"


def samples_of(run: Path) -> list[TrainingSample]:
    with warnings.catch_warnings(action="ignore"):
        (episode,) = make_unit_reader(run)([unit(TURNS + 1)])
    return unit_samples(unit(TURNS + 1), episode)


def test_a_turn_routed_twice_counts_its_lost_neighbour_once(tmp_path: Path) -> None:
    routing = written(tmp_path)
    file_of(routing, 2).unlink()
    samples = samples_of(tmp_path)
    assert len(samples) == 2
    assert sorted(sample.lost_routing for sample in samples) == [0, 1]


@pytest.mark.parametrize(
    "reference",
    [
        RoutingReference(bytes(32), "../../elsewhere"),
        RoutingReference(bytes(32), "/etc"),
        RoutingReference(bytes(32), ""),
        RoutingReference(b"", "0" * 32),
        RoutingReference(bytes(1 << 20), "0" * 32),
        RoutingReference(bytes(32), "0" * 32, "10.0.0.9\x1b[2J"),
    ],
)
def test_names_of_a_received_run_lead_nowhere_else(tmp_path: Path, reference: RoutingReference) -> None:
    written(tmp_path, change=lambda entry: msgspec.structs.replace(entry, routing=reference))
    (tmp_path / "elsewhere").mkdir()
    reasons = r"no directory of expert routing|does not exist|directory|digest|10\.0\.0\.9"
    with pytest.warns(UserWarning, match=reasons) as told:
        row = read(tmp_path)
    assert (row.lost_routing, row.experts) == (TURNS, None)
    text = str(told[0].message)
    assert len(text) < 500
    assert text.isprintable()


def test_linked_directories_are_not_followed(tmp_path: Path) -> None:
    routing = written(tmp_path / "run")
    routing.rename(tmp_path / "elsewhere")
    routing.symlink_to(tmp_path / "elsewhere")
    with pytest.warns(UserWarning, match="symbolic link"):
        assert read(tmp_path / "run").lost_routing == TURNS
    routing.unlink()
    (folder,) = (tmp_path / "elsewhere").iterdir()
    routing.mkdir()
    (routing / folder.name).symlink_to(folder)
    with pytest.warns(UserWarning, match="symbolic link"):
        assert read(tmp_path / "run").lost_routing == TURNS


def test_routing_of_another_row_or_model_is_not_replayed(tmp_path: Path) -> None:
    """Valid files, of which a received run's entries name the wrong ones."""
    store = RoutingStore.of_journal(tmp_path / "journal")
    (tmp_path / "journal").mkdir()
    long = ExpertRouting(np.zeros((500, LAYERS, TOP_K), np.uint16))
    other = ExpertRouting(np.zeros((2, LAYERS + 1, TOP_K), np.uint16), 12)
    references = [store.put("e0", 0, content) for content in (long.encode(), other.encode(), b"nothing")]
    for at, reference in enumerate(references, 1):
        run = tmp_path / f"run{at}"

        def change(entry: TurnEntry, reference: RoutingReference = reference) -> TurnEntry:
            return msgspec.structs.replace(entry, routing=reference) if entry.turn == 2 else entry

        routing = written(run, change=change)
        (folder,) = (tmp_path / "journal/routing").iterdir()
        for file in folder.iterdir():
            (routing / reference.folder / file.name).write_bytes(file.read_bytes())
        with pytest.warns(UserWarning, match="turn 2: its expert routing"):
            assert read(run).lost_routing == 1


def test_a_prune_removes_the_routing_of_its_attempts(tmp_path: Path) -> None:
    asyncio.run(write_run(tmp_path))
    store = RoutingStore.of_journal(tmp_path / "journal")
    kept, removed, damaged = (
        store.put(*each) for each in (("e2", 0, b"kept"), ("e0", 0, bytes(1 << 20)), ("e1", 0, b""))
    )
    shutil.rmtree(tmp_path / "journal/routing" / damaged.folder)
    (tmp_path / "journal/routing" / damaged.folder).touch()
    assert prune(tmp_path, rule(0, 2, 1)).bytes > 1 << 20
    content, reason = store.read([kept, removed])
    assert content == b"kept"
    assert "does not exist" in str(reason)
    assert {folder.name for folder in (tmp_path / "journal/routing").iterdir()} == {kept.folder, damaged.folder}


_KILLED = """
import os, signal, sys
from pathlib import Path
from agentrl.journal import routing

(Path(sys.argv[1]) / "journal").mkdir(exist_ok=True)
open_file = os.open

def dying(path, *flags):
    descriptor = open_file(path, *flags)
    if "routing" in str(path):
        os.write(descriptor, b"half")
        os.kill(os.getpid(), signal.SIGKILL)
    return descriptor

os.open = dying
routing.RoutingStore.of_journal(Path(sys.argv[1]) / "journal").put("e0", 0, b"half of it is written")
"""


def test_a_file_cut_off_by_a_kill_is_written_again(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    (file,) = (tmp_path / "journal/routing").glob("*/*")
    assert file.read_bytes() == b"half"
    store = RoutingStore.of_journal(tmp_path / "journal")
    assert store.read([store.put("e0", 0, b"half of it is written")]) == [b"half of it is written"]


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of a received run, which is resumed."""
    (tmp_path / "journal").mkdir()
    store = RoutingStore.of_journal(tmp_path / "journal")
    reference = store.put("e0", 0, b"content")
    _pipe(tmp_path / "journal/routing" / reference.folder / reference.digest.hex())
    assert store.put("e0", 0, b"content") == reference
    assert "could not be written" in capfd.readouterr().err


def test_routing_that_cannot_be_written_is_lost_and_said_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without its directory: a run that was moved away is not made again."""
    store = RoutingStore.of_journal(tmp_path / "moved")
    references = [store.put("e0", 0, content) for content in (b"one", b"two")]
    assert capfd.readouterr().err.count("could not be written") == 1
    assert ["does not exist" in str(reason) for reason in store.read(references)] == [True, True]


def test_another_host_keeps_the_newest_in_a_private_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    store = HostRoutingStore("10.0.0.2")
    references = [store.put(f"e{number}", 0, bytes([number]) * 1000) for number in range(4)]
    assert {reference.host for reference in references} == {"10.0.0.2"}
    (directory,) = tmp_path.iterdir()
    assert directory.stat().st_mode & 0o777 == 0o700
    for number, reference in enumerate(references):
        os.utime(directory / reference.folder, (number, number))
    store.remove_oldest(2500)
    answers = HostRoutingStore("10.0.0.2").read(references)
    assert [isinstance(answer, bytes) for answer in answers] == [False, False, True, True]
    assert str(answers[0]).startswith("on host 10.0.0.2, ")
    directory.chmod(0o777)
    lost = HostRoutingStore("10.0.0.2").put("e9", 0, b"where others may write")
    assert not (directory / lost.folder / lost.digest.hex()).exists()


def test_the_oldest_are_removed_in_no_directory_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user may make a link, or a directory, of the name that this host's routing has in /tmp."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    attempt = tmp_path / "home" / ("0" * 32)
    attempt.mkdir(parents=True)
    (attempt / "mine").write_bytes(bytes(1000))
    store = HostRoutingStore("10.0.0.2")
    place = tmp_path / "tmp" / f"agentrl-routing-{os.getuid()}"
    place.symlink_to(tmp_path / "home")
    store.remove_oldest(0)
    place.unlink()
    (tmp_path / "home").rename(place)
    place.chmod(0o777)
    store.remove_oldest(0)
    assert (place / attempt.name / "mine").exists()
    place.chmod(0o700)
    (place / "notes").write_bytes(bytes(1000))
    store.remove_oldest(0)
    assert [path.name for path in place.iterdir()] == ["notes"], "a name of no attempt ended the removal"


def test_a_received_file_of_tiny_rows_takes_no_more_memory_than_its_size() -> None:
    content = ExpertRouting(np.zeros((1 << 20, 2, 1), np.uint8)).encode()
    tracemalloc.start()
    try:
        assert len(decode_routing(content, 1 << 20, plain=True).rows) == 1 << 20
        with pytest.raises(ValueError, match="does not fit its row"):
            decode_routing(content, (1 << 20) - 1, plain=True)
        assert tracemalloc.get_traced_memory()[1] < 3 * len(content)
    finally:
        tracemalloc.stop()
