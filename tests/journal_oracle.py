"""A second reader of a run's journal, written from docs/reference/journal_format.md: it imports nothing of agentrl.

`judge(run)` reads a run directory, also one that is being written, and returns a sentence for each rule of that page
that does not hold; the word in front of the colon names the rule:

* `file`: a database that cannot be read at all.
* `checksum`, `digest`: bytes that are not those that were written.
* `entries`: a committed episode's entries, and what the control log says of it, differ.
* `unknown version`: a token names a version that has no row in `versions`, or none of the step that made it.
* `versions`: a row does not follow from its parent, or its files have another digest.
* `order`: a number of the log is missing, or there twice.
* `ledger`: an episode or a unit is accounted for twice, or not at all.
* `step`: an optimizer step was fed something else than the journal holds.
* `reward`, `credit`: a reward, baseline or advantage is another than follows from what was given.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import math
import re
import sqlite3
import struct
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tests.journal_credit import COMPARED, Credit, Row, advantages, agent_of, by_state, pieces

Attempt = tuple[str, int]
"""Episode and attempt."""
Version = tuple[str, int, int]
"""Policy, lineage, step."""
Unit = tuple[str, int, str]
"""Episode, attempt, policy."""

PAGE = Path(__file__).resolve().parents[1] / "docs/reference/journal_format.md"
CODES = {"float32": "f", "float64": "d", "int32": "i", "bool": "?"}
"""Types of the page, as `struct` calls them."""


class Column(NamedTuple):
    """A row of the page's table of columns with one number per token."""

    name: str
    code: str
    is_recorded: bool
    fill: bytes
    """Value of tokens without the column; empty: rows have no such column."""


def columns_of(page: str) -> tuple[Column, ...]:
    """The columns that a text of the page lists, in its order."""
    rows = re.findall(r"^  \| `(\w+)` \| (\w+) \| (yes|no) \| (\S*) ?\|$", page, re.MULTILINE)
    return tuple(
        Column(name, CODES[kind], recorded == "yes", _fill_bytes(kind, fill.replace("−", "-")) if fill else b"")
        for name, kind, recorded, fill in rows
    )


def _fill_bytes(kind: str, number: str) -> bytes:
    return struct.pack(f"<{CODES[kind]}", float(number) if kind.startswith("float") else int(number))


COLUMNS = columns_of(PAGE.read_text(encoding="utf-8"))
UNCHECKED = ("meta", "metrics")
FILES = {"full": ("model.safetensors",), "adapter": ("adapter_model.safetensors", "adapter_config.json")}
LIMITS = ("max_tokens", "max_turns", "context_length", "time_limit")
KAPPA = 3.0
MOST = 50
"""Violations named; more are counted."""


def judge(run_path: str | Path, *, ended: bool = False) -> list[str]:
    """Judge the run in a directory.

    Args:
        run_path: holds `journal/`.
        ended: the run says that it has taken all its steps: nothing may be in flight or ready.

    Returns:
        Violations, none where the journal holds, where there is none yet, and where it is of no run, fork, evaluation
        or import: what a test wrote by itself follows no configuration.
    """
    journal = Path(run_path) / "journal"
    if not (journal / "control.db").is_file():
        return []
    try:
        return _Judge(Path(run_path), ended=ended).violations()
    except (sqlite3.Error, msgspec.MsgspecError, ValueError, LookupError, TypeError, AttributeError) as error:
        return [f"file: the journal cannot be read ({type(error).__name__}: {error})"]


class Turn(NamedTuple):
    """What is kept of a turn."""

    seat: str
    index: int
    row: int
    number: int
    context: int
    sampled: int
    counted: int
    """Its part of `tokens`."""
    parent_context: int
    versions: tuple[Version, ...]
    state: bytes
    """Hash of its anchor state."""


class Recorded:
    """The entries of an attempt in a partition."""

    def __init__(self) -> None:
        self.count = 0
        self.calls: set[str] = set()
        self.digest = b""
        self.kinds: Counter[str] = Counter()
        self.turns: list[Turn] = []
        self.rewards: list[tuple[str, int, float, int | None, str, float]] = []
        self.fork: dict[str, Any] | None = None
        """The point at which the attempt left another one, as its `begin` has it."""
        self.bodies: list[list[Any]] = []
        """Turns, if the entries are inherited."""

    def sampled_by(self, seat: str, index: int) -> set[Version]:
        """The versions that an agent's tokens name."""
        return {v for turn in self.turns if (turn.seat, turn.index) == (seat, index) for v in turn.versions}


# --- bytes ------------------------------------------------------------------------------------------------------------


def sums(values: Iterable[tuple[Any, float]]) -> dict[Any, float]:
    """Sums by key, each correctly rounded."""
    parts: dict[Any, list[float]] = defaultdict(list)
    for key, value in values:
        parts[key].append(value)
    return {key: math.fsum(each) for key, each in parts.items()}


def packed(values: Sequence[Any]) -> bytes:
    """Values of a row as a msgpack array, each in its shortest form."""
    count = len(values)
    return (bytes([0x90 | count]) if count < 16 else b"\xdc" + struct.pack(">H", count)) + b"".join(
        map(_packed, values)
    )


def _packed(value: Any) -> bytes:
    if value is None:
        return b"\xc0"
    if isinstance(value, float):
        return b"\xcb" + struct.pack(">d", value + 0.0)
    if isinstance(value, int):
        return _packed_integer(value)
    data = value.encode() if isinstance(value, str) else bytes(value)
    marks = ((0xD9, ">B", 1 << 8), (0xDA, ">H", 1 << 16), (0xDB, ">I", 1 << 32))
    if isinstance(value, str):
        if len(data) < 32:
            return bytes([0xA0 | len(data)]) + data
    else:
        marks = ((0xC4, ">B", 1 << 8), (0xC5, ">H", 1 << 16), (0xC6, ">I", 1 << 32))
    mark, form = next((mark, form) for mark, form, limit in marks if len(data) < limit)
    return bytes([mark]) + struct.pack(form, len(data)) + data


def _packed_integer(value: int) -> bytes:
    if -32 <= value < 128:
        return struct.pack(">b", value)
    if value > 0:
        forms = ((0xCC, ">B", 1 << 8), (0xCD, ">H", 1 << 16), (0xCE, ">I", 1 << 32), (0xCF, ">Q", 1 << 64))
        mark, form = next((mark, form) for mark, form, limit in forms if value < limit)
    else:
        forms = ((0xD0, ">b", 1 << 7), (0xD1, ">h", 1 << 15), (0xD2, ">i", 1 << 31), (0xD3, ">q", 1 << 63))
        mark, form = next((mark, form) for mark, form, limit in forms if value >= -limit)
    return bytes([mark]) + struct.pack(form, value)


def row_checksum(table: str, values: Sequence[Any]) -> int:
    """Of a row of `control.db`, without its last column."""
    return zlib.crc32(table.encode() + packed(values))


def entry_checksum(episode: str, attempt: int, call: str, asked: bytes, body: bytes) -> int:
    """Of a row of `entries` or `partials`."""
    return zlib.crc32(f"{episode}\x1f{attempt}\x1f{call}\x1f{len(asked)}".encode() + asked + body)


# --- reading ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(path: Path) -> Iterator[sqlite3.Connection]:
    """A database, read in one transaction."""
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=20, isolation_level=None)
    try:
        connection.execute("BEGIN")
        yield connection
    finally:
        connection.close()


class _Judge:
    def __init__(self, run: Path, *, ended: bool) -> None:
        self.run = run
        self.ended = ended
        self.found: list[str] = []
        self.tables: dict[str, list[Row]] = {}
        self.recorded: dict[tuple[str, str, int], Recorded] = defaultdict(Recorded)
        """By partition, episode, attempt."""
        self.named: dict[Version, str] = {}
        """Versions that tokens name, and one place each."""

    def say(self, rule: str, what: str) -> None:
        self.found.append(f"{rule}: {what}")

    def violations(self) -> list[str]:
        control = self.run / "journal" / "control.db"
        with opened(control) as connection:
            meta = dict(connection.execute("SELECT key, value FROM meta"))
        self.info: Row = json.loads(meta.get("info", "{}"))
        self.starts = sorted(
            (json.loads(value) for key, value in meta.items() if key.startswith("life.")),
            key=lambda start: int(start["lineage"]),
        )
        if not self.info.keys() & {"config", "evaluated"}:
            return []
        self.checkpoints = self.sealed()
        with opened(control) as connection:
            self.read_control(connection)
        for path in sorted(control.parent.glob("turns-*.db")):
            with opened(path) as connection:
                self.read_turns(path.name, connection)
        with opened(control) as connection:
            names = "policy, lineage, step"
            self.known = set(connection.execute(f"SELECT {names} FROM versions"))
            self.stepped = set(connection.execute(f"SELECT {names} FROM steps"))
            given_up = connection.execute("SELECT episode, attempt FROM pruned") if "pruned" in self.tables else ()
            self.pruned: set[Attempt] = set(given_up)
        self.config = self.info.get("config") or {}
        self.is_run = not self.info.get("forks") and not self.info.get("evaluated")
        self.judge_entries()
        self.judge_names()
        if self.config.get("policies") and self.is_run:
            self.judge_versions()
            self.judge_ledger()
            self.add_group_scores()
            self.judge_steps()
            self.judge_credit()
        return [*self.found[:MOST], *([f"… and {len(self.found) - MOST} more"] if len(self.found) > MOST else [])]

    def sealed(self) -> dict[str, dict[str, Any]]:
        """Versions of the checkpoints, read before the journal: that was flushed before they were sealed."""
        sealed = {}
        for path in sorted((self.run / "checkpoints").glob("step_*/manifest.json")):
            with contextlib.suppress(OSError, ValueError):
                sealed[path.parent.name] = json.loads(path.read_text())["versions"]
        return sealed

    def read_control(self, connection: sqlite3.Connection) -> None:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        for table in tables:
            if table in UNCHECKED or table.startswith("sqlite_"):
                continue
            cursor = connection.execute(f"SELECT * FROM {table}")
            names = [column[0] for column in cursor.description]
            rows = self.tables[table] = []
            for values in cursor:
                if row_checksum(table, values[:-1]) != values[-1]:
                    self.say("checksum", f"a row of {table}, {values[:3]}, does not fit")
                rows.append(dict(zip(names, values, strict=True)))
        ignored = connection.execute("SELECT key FROM meta WHERE key GLOB 'ignored.*'")
        numbers = [int(key.removeprefix("ignored.")) for (key,) in ignored]
        numbers += [row["seq"] for rows in self.tables.values() for row in rows if "seq" in row]
        if odd := [number for place, number in enumerate(sorted(numbers)) if number != place]:
            self.say("order", f"no record has the number before {odd[0]}, or two have {odd[0]}")

    def read_turns(self, partition: str, connection: sqlite3.Connection) -> None:
        columns = "episode, attempt, call, asked, body, checksum"
        for table in ("entries", "partials"):
            for episode, attempt, call, asked, body, checksum in connection.execute(
                f"SELECT {columns} FROM {table} ORDER BY id"
            ):
                where = f"{table} of {episode} attempt {attempt}, call {call}, in {partition}"
                if entry_checksum(episode, attempt, call, asked, body) != checksum:
                    self.say("checksum", f"{where} does not fit")
                    continue
                content = msgspec.msgpack.decode(body)
                if table == "partials":
                    _, (_, spans, _) = content
                    for _, _, version in spans:
                        self.named.setdefault(tuple(version), where)
                    continue
                own = self.recorded[partition, episode, attempt]
                own.count += 1
                own.digest = hashlib.blake2b(own.digest + call.encode() + body, digest_size=16).digest()
                own.kinds[content[0]] += 1
                if call in own.calls:
                    self.say("entries", f"{where} is there twice")
                own.calls.add(call)
                if content[0] == "turn":
                    self.read_turn(own, content, where)
                elif content[0] == "begin":
                    own.fork = content[11] if len(content) > 11 else None
                elif content[0] in ("reward", "score"):
                    own.rewards.append((*content[1:5], *(content[5:7] or ("reward", 1.0))))

    def read_turn(self, own: Recorded, body: list[Any], where: str) -> None:
        seat, index, _, row, number, context, (sampled, spans, columns) = body[1:8]
        parent_context, logprobs = body[16] if len(body) > 16 else 0, columns["logprobs"]
        count, at = len(sampled) // 4, 0
        if len(sampled) % 4 or len(context) % 4 or len(logprobs) != len(sampled):
            self.say("entries", f"{where}: columns of {len(context)}, {len(sampled)}, {len(logprobs)} bytes")
        for start, stop, version in spans:
            if start != at or stop <= start:
                self.say("entries", f"{where}: its spans {spans} do not follow each other")
            at = stop
            self.named.setdefault(tuple(version), where)
        if at != count:
            self.say("entries", f"{where}: spans cover {at} of {count} tokens")
        recorded = {column.name: len(column.fill) for column in COLUMNS if column.is_recorded}
        if unknown := columns.keys() - recorded.keys() - {"kept", "experts"}:
            self.say("entries", f"{where}: columns {sorted(unknown)} of its tokens")
        for name in recorded.keys() & columns.keys():
            if len(columns[name]) != recorded[name] * count:
                self.say("entries", f"{where}: {len(columns[name])} bytes of {name} for {count} tokens")
        if "kept" in columns:
            counts = [c for (c,) in struct.iter_unpack("<i", columns["kept"][: 4 * count])]
            ids = sum(c if c > 0 else -1 - c for c in counts if c)
            if len(counts) != count or ids * 4 != len(columns["kept"]) - 4 * count:
                self.say("entries", f"{where}: kept sets of {len(counts)} of {count} tokens")
        if len(body) > 20 and body[20] is not None:
            self.read_routing(*body[20], where)
        versions = tuple(tuple(version) for _, _, version in spans)
        counted = count if any(logprobs) else _tokens_of_endpoint(body[9], count)
        lengths = (len(context) // 4, count, counted, parent_context)
        own.turns.append(Turn(seat, index, row, number, *lengths, versions, _state(body)))

    def read_routing(self, digest: bytes, folder: str, host: str, where: str) -> None:
        if not re.fullmatch("[0-9a-f]{32}", folder) or len(digest) != 32:
            self.say("entries", f"{where}: its routing is {digest.hex()} in {folder}")
        file = self.run / "journal/routing" / folder / digest.hex()
        if not host and file.exists() and hashlib.sha256(file.read_bytes()).digest() != digest:
            self.say("entries", f"{where}: {file} is damaged")

    # --- entries ------------------------------------------------------------------------------------------------------

    def judge_entries(self) -> None:
        trajectories: dict[Attempt, list[Row]] = defaultdict(list)
        for row in self.tables["trajectories"]:
            trajectories[row["episode"], row["attempt"]].append(row)
        for row in self.tables["episodes"]:
            key = (row["episode"], row["attempt"])
            if row["partition"] is None:
                continue
            own = self.recorded.get((row["partition"], *key))
            if own is None and key in self.pruned:
                continue
            if own is None:
                self.say("entries", f"{key}: {row['partition']} holds none of its {row['entries']}")
                continue
            if own.count != row["entries"]:
                self.say("entries", f"{key}: {own.count} in {row['partition']}, {row['entries']} were committed")
            if row["digest"] and own.digest != row["digest"]:
                self.say("digest", f"{key}: its entries in {row['partition']} are not those that were committed")
            if not own.kinds["begin"]:
                self.say("entries", f"{key}: no `begin`")
            inherited = Recorded() if own.fork is None else self.prefix(own.fork, self.run / "journal")
            ordered = sorted(trajectories[key], key=lambda t: (t["seat"], t["agent"]))
            self.judge_trajectories(row, own, inherited, ordered)

    def prefix(self, point: Mapping[str, Any], journal: Path) -> Recorded:
        """What an attempt inherited from another one, whose journal is named relative to its own."""
        parent_journal = journal / point["journal"]
        with opened(parent_journal / point["partition"]) as connection:
            statement = "SELECT call, body FROM entries WHERE episode = ? AND attempt = ? ORDER BY id"
            rows = list(connection.execute(statement, (point["episode_id"], point["attempt"])))
        begin = msgspec.msgpack.decode(rows[0][1])
        above = begin[11] if len(begin) > 11 else None
        inherited = Recorded() if above is None else self.prefix(above, parent_journal)
        named = dict(self.named)
        for call, body in rows:
            if call == point["call_id"]:
                self.named = named  # its versions are those of another run
                return inherited
            content = msgspec.msgpack.decode(body)
            if content[0] == "turn":
                self.read_turn(inherited, content, f"call {call} of {point}")
                inherited.bodies.append(content)
            elif content[0] in ("reward", "score"):
                inherited.rewards.append((*content[1:5], *(content[5:7] or ("reward", 1.0))))
        if point["call_id"] == "end" and not point["branch"]:
            self.named = named
            return inherited
        self.say("entries", f"the call of {point} does not exist")
        return inherited

    def judge_trajectories(self, episode: Row, own: Recorded, inherited: Recorded, rows: Sequence[Row]) -> None:
        key = (episode["episode"], episode["attempt"])
        agents: dict[tuple[str, int], list[Turn]] = defaultdict(list)
        for turn in own.turns:
            agents[turn.seat, turn.index].append(turn)
        if own.fork is not None:
            for turn in inherited.turns:
                agents[turn.seat, turn.index] += []
        if {(row["seat"], row["agent"]) for row in rows} != agents.keys():
            self.say(
                "entries", f"{key}: trajectories of {[(r['seat'], r['agent']) for r in rows]}, {set(agents)} acted"
            )
            return
        totals = (len(inherited.turns) + len(own.turns), sum(turn.counted for turn in own.turns))
        if (episode["turns"], episode["tokens"]) != totals:
            self.say("entries", f"{key}: {totals} turns and tokens are in {episode['partition']}, not in `episodes`")
        for row in rows:
            agent = (row["seat"], row["agent"])
            before = [turn for turn in inherited.turns if (turn.seat, turn.index) == agent]
            self.judge_rows(key, agent, agents[agent], before)
            if row["tokens"] != sum(turn.counted for turn in agents[agent]):
                self.say("entries", f"{key}: {agent} has {row['tokens']} tokens in `trajectories`")
            newest = [turn.versions[-1][1:] for turn in before if turn.versions]
            oldest = min(((v[1], v[2]) for v in own.sampled_by(*agent)), default=newest[-1] if newest else (0, 0))
            told = (row["lineage"], row["oldest_step"])
            if told != oldest and not (own.kinds["end"] and told <= oldest):  # a call that was cut counts too
                self.say("entries", f"{key}: {agent} has oldest weights {told}, and its spans {oldest}")
            states = b"".join(turn.state for turn in sorted([*before, *agents[agent]], key=lambda turn: turn.number))
            if row["turn_states"] not in (None, states):
                self.say("entries", f"{key}: {agent} has states {row['turn_states'].hex()}, its turns {states.hex()}")
            given = [given[2:] for given in (*inherited.rewards, *own.rewards) if given[:2] == agent]
            is_void = row["reward"] is None and episode["stop_reason"] != "completed"  # truncated_reward = None
            self.judge_rewards(key, agent, row, [] if is_void else given)
        rewards = [row["reward"] for row in rows if row["reward"] is not None]
        if episode["reward"] != (sum(rewards) if rewards else None):
            self.say("reward", f"{key}: {episode['reward']} in `episodes`, and its agents have {rewards}")

    def judge_rewards(
        self,
        key: Attempt,
        agent: tuple[str, int],
        row: Row,
        own_rewards: Sequence[tuple[float, int | None, str, float]],
    ) -> None:
        given = [(value * weight, turn) for value, turn, _, weight in own_rewards]
        by_name = sums((name, value) for value, _, name, _ in own_rewards)
        reward = math.fsum(value for value, _ in given) if given else None
        named = [] if by_name == {"reward": reward} else sorted(by_name.items())
        if json.loads(row["named_rewards"] or "[]") != [list(each) for each in named]:
            self.say("reward", f"{key}: {agent} has {row['named_rewards']} by name, and was given {named}")
        if row["reward"] != reward:
            self.say("reward", f"{key}: {agent} was given {reward}, and {row['reward']} is in `trajectories`")
        by_turn = sums((turn, value) for value, turn in given if turn is not None)
        if dict(map(tuple, json.loads(row["turn_rewards"] or "[]"))) != by_turn:
            self.say("reward", f"{key}: {agent} has turn rewards {row['turn_rewards']}, and was given {by_turn}")

    def judge_rows(
        self, key: Attempt, agent: tuple[str, int], turns: Sequence[Turn], inherited: Sequence[Turn]
    ) -> None:
        lengths: dict[int, int] = defaultdict(int)
        for turn in inherited:
            lengths[turn.row] += turn.context + turn.sampled
        numbers = sorted(turn.number for turn in turns)
        if numbers != [*range(len(inherited), len(inherited) + len(numbers))]:
            self.say("entries", f"{key}: {agent} has turns {numbers}")
        for turn in sorted(turns, key=lambda turn: turn.number):
            if turn.parent_context not in (0, lengths[turn.row]):
                self.say("entries", f"{key}: turn {turn.number} of {agent} continues a row of {turn.parent_context}")
            lengths[turn.row] += turn.context + turn.sampled

    # --- versions -----------------------------------------------------------------------------------------------------

    @property
    def trained(self) -> set[str]:
        policies: Mapping[str, Mapping[str, Any]] = self.config.get("policies") or {}
        return {name for name, policy in policies.items() if policy.get("kind", "trained") == "trained"}

    def judge_names(self) -> None:
        """Versions that tokens name are known, wherever the tokens lie: in a committed episode, another, a partial."""
        trained = self.trained if self.is_run else set()
        first = self.first_steps()
        for version, where in self.named.items():
            policy, lineage, step = version
            if version not in self.known:
                if policy in trained or (lineage, step) != (0, 0):
                    self.say("unknown version", f"{_name(version)}, {where}")
            elif (
                self.is_run
                and lineage >= 0
                and step > first.get((policy, lineage), step)
                and version not in self.stepped
            ):
                self.say("unknown version", f"{_name(version)} has no row in `steps`; {where}")

    def first_steps(self) -> dict[tuple[str, int], int]:
        """The smallest step of each (policy, lineage)."""
        first: dict[tuple[str, int], int] = {}
        for policy, lineage, step in self.known:
            first[policy, lineage] = min(step, first.get((policy, lineage), step))
        return first

    def judge_versions(self) -> None:
        rows = {_version(row): row for row in self.tables["versions"]}
        steps = {_version(row): row for row in self.tables["steps"]}
        for version, row in rows.items():
            if not re.fullmatch("[0-9a-f]{64}", row["sha256"]):
                self.say("versions", f"{_name(version)}: its digest is {row['sha256']!r}")
            self.judge_files(version, row)
            if version[1] >= 0:
                self.judge_parent(version, row, rows, steps)
        for version in steps.keys() - rows.keys():
            self.say("versions", f"{_name(version)}: a step made it, and it has no row")
        for checkpoint, versions in self.checkpoints.items():
            for policy, (lineage, step) in versions.items():
                if step and (policy, lineage, step) not in rows:
                    self.say("versions", f"checkpoint {checkpoint} is of {policy}@{lineage}.{step}, which has no row")

    def judge_parent(
        self, version: Version, row: Row, rows: Mapping[Version, Row], steps: Mapping[Version, Row]
    ) -> None:
        policy, lineage, step = version
        parent = None if row["parent_lineage"] is None else (row["parent_lineage"], row["parent_step"])
        if (policy, lineage, step - 1) in rows:
            if parent != (lineage, step - 1):
                self.say("versions", f"{_name(version)}: its parent is {parent}")
            made = steps.get(version)
            if made is None and (policy, lineage, step + 1) in rows:  # a kill may leave the newest without its step
                self.say("versions", f"{_name(version)}: no row in `steps`")
            if made is not None and (made["started_lineage"], made["started_step"]) != parent:
                self.say("versions", f"{_name(version)}: its step started from another version than {parent}")
        elif parent is None:
            if step:
                self.say("versions", f"{_name(version)}: neither a parent nor a step before it")
        elif parent[0] >= lineage or parent[1] != step or (policy, *parent) not in rows:
            self.say("versions", f"{_name(version)}: its lineage begins from {parent}")

    def judge_files(self, version: Version, row: Row) -> None:
        policy, lineage, step = version
        directory = self.run / "versions" / policy / f"{lineage}.{step}" if lineage >= 0 else Path(row["path"])
        digest = hashlib.sha256()
        try:
            for name in FILES[row["kind"]]:
                digest.update((directory / name).read_bytes())
        except FileNotFoundError:
            return  # it was let go of, or a trainer of its own wrote other files
        if digest.hexdigest() != row["sha256"]:
            self.say("versions", f"{_name(version)}: the files in {directory} have another digest")

    def line(self, policy: str) -> list[Version]:
        """The steps that led to the newest version of a policy."""
        rows = {
            _version(row): row for row in self.tables["versions"] if row["policy"] == policy and row["lineage"] >= 0
        }
        if not rows:
            return []
        line: list[Version] = []
        at: Version | None = max(rows, key=lambda version: version[1:])
        while at in rows:
            line.append(at)
            row = rows[at]
            at = None if row["parent_lineage"] is None else (policy, row["parent_lineage"], row["parent_step"])
            if at in line:
                self.say("versions", f"{_name(at)} is among its own ancestors")
                break
        return line

    # --- ledger -------------------------------------------------------------------------------------------------------

    def judge_ledger(self) -> None:
        admitted = {(row["episode"], row["attempt"]): row for row in self.tables["admissions"]}
        ended = {(row["episode"], row["attempt"]): row for row in self.tables["episodes"]}
        for key in ended.keys() - admitted.keys():
            self.say("ledger", f"{key} ended and was never admitted")
        committed = {key for key, row in ended.items() if row["purpose"] == "train" and row["drop_reason"] is None}
        for episode, count in Counter(episode for episode, _ in committed).items():
            if count > 1:
                self.say("ledger", f"{episode} was committed {count} times")
        units = {
            (row["episode"], row["attempt"], row["policy"])
            for row in self.tables["trajectories"]
            if (row["episode"], row["attempt"]) in committed and row["policy"] in self.trained
        }
        consumed = self.consumed()
        dropped = {(row["episode"], row["attempt"], row["policy"]) for row in self.tables["unit_drops"]}
        self.judge_units(units, consumed, dropped)
        if self.ended:
            newest: dict[str, int] = {}
            for (episode, attempt), row in admitted.items():
                if row["purpose"] == "train":
                    newest[episode] = max(attempt, newest.get(episode, 0))
            for key in newest.items() - ended.keys():
                self.say("ledger", f"{key} is in flight at the end")
            for unit in units - consumed.keys() - dropped:
                self.say("ledger", f"{unit} is ready at the end")

    def judge_units(self, units: set[Unit], consumed: Counter[Unit], dropped: set[Unit]) -> None:
        for unit, count in consumed.items():
            if count > 1:
                self.say("ledger", f"{unit} was trained {count} times along the surviving line")
            if unit not in units:
                self.say("ledger", f"{unit} was trained and never committed")
            if unit in dropped:
                self.say("ledger", f"{unit} was trained and dropped")
        for unit in dropped - units:
            self.say("ledger", f"{unit} was dropped and never committed")

    def consumed(self) -> Counter[Unit]:
        """How many steps of the surviving lines were fed each unit."""
        fed: dict[Version, set[Unit]] = defaultdict(set)
        for row in self.tables["step_units"]:
            fed[_version(row)].add((row["episode"], row["attempt"], row["policy"]))
        return Counter(unit for policy in self.trained for step in self.line(policy) for unit in fed[step])

    # --- steps --------------------------------------------------------------------------------------------------------

    def judge_steps(self) -> None:
        trajectories: dict[Unit, dict[tuple[str, int], Row]] = defaultdict(dict)
        for row in self.tables["trajectories"]:
            trajectories[row["episode"], row["attempt"], row["policy"]][row["seat"], row["agent"]] = row
        self.partitions = {(row["episode"], row["attempt"]): row["partition"] for row in self.tables["episodes"]}
        fed: dict[Version, dict[Unit, list[Row]]] = defaultdict(lambda: defaultdict(list))
        for row in self.tables["step_units"]:
            fed[_version(row)][row["episode"], row["attempt"], row["policy"]].append(row)
        for row in self.tables["steps"]:
            version, units = _version(row), fed[_version(row)]
            positions = sorted(each["position"] for rows in units.values() for each in rows)
            if positions != list(range(row["fed"])):
                self.say("step", f"{_name(version)} was fed {row['fed']} trajectories, and {len(positions)} have rows")
            elif row["columns_file"] is not None and all(
                (self.partitions.get(unit[:2]), *unit[:2]) in self.recorded for unit in units
            ):
                self.judge_inputs(version, row, units)
        for version, units in fed.items():
            for unit, rows in units.items():
                agents = [(row["seat"], row["agent"]) for row in rows]
                there = trajectories.get(unit, {})
                if sorted(agents) != sorted(there):
                    self.say("step", f"{_name(version)} was fed {agents} of {unit}, which has {sorted(there)}")
                    continue
                for row, agent in zip(rows, agents, strict=True):
                    if row["reward"] != there[agent]["reward"]:
                        self.say("step", f"{_name(version)}: {agent} of {unit} with a reward of {row['reward']}")
                    own = self.recorded.get((self.partitions.get(unit[:2]) or "", *unit[:2]))
                    later = {v for v in own.sampled_by(*agent) if v[1:] >= version[1:]} if own else set()
                    if later:
                        self.say("step", f"{_name(version)} was fed tokens of {_name(min(later))} in {unit}")

    def judge_inputs(self, version: Version, row: Row, units: Mapping[Unit, list[Row]]) -> None:
        """The digest of what a step was fed, made again from the entries and the credits."""
        try:
            content = (self.run / row["columns_file"]).read_bytes()
        except FileNotFoundError:
            return  # it was let go of
        if re.fullmatch("(2:)?[0-9a-f]{32}", row["input_digest"]):
            return  # of an earlier version
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        configs = self.configs()
        policy = configs[max(each for each in configs if each <= version[1])]["policies"].get(version[0], {})
        bound = policy.get("max_lag")
        started = (row["started_lineage"], row["started_step"])
        digests: dict[tuple[str, int], bytes] = {}
        for (episode, attempt, _), rows in units.items():
            inputs = list[tuple[list[list[Any]], Row]]()
            for credit in sorted(rows, key=lambda each: (each["seat"], each["agent"])):
                by_row: dict[int, list[list[Any]]] = defaultdict(list)
                for turn in self.turns_of(episode, attempt, credit["seat"], credit["agent"]):
                    if "experts" in turn[7][2] or (len(turn) > 20 and turn[20] is not None):
                        return  # experts may have made several pieces of a row
                    by_row[turn[4]].append(turn)
                for _, turns in sorted(by_row.items()):
                    if not turns[-1][7][0]:
                        continue  # all were inherited
                    inputs.append((turns, credit))
            for number, (turns, credit) in enumerate(inputs):
                digests[episode, number] = _row_digest(turns, credit, started, bound)
        whole = hashlib.blake2b(digest_size=16)
        for episode, number in json.loads(header["__metadata__"]["rows"]):
            whole.update(digests.get((episode, number), b""))
        if "3:" + whole.hexdigest() != row["input_digest"]:
            self.say("step", f"{_name(version)} was fed something else than the journal holds of its rows")

    def turns_of(self, episode: str, attempt: int, seat: str, agent: int) -> list[list[Any]]:
        """The bodies of an agent's turns, in order."""
        with opened(self.run / "journal" / self.partitions[episode, attempt]) as connection:
            query = "SELECT body FROM entries WHERE episode = ? AND attempt = ?"
            bodies = [msgspec.msgpack.decode(body) for (body,) in connection.execute(query, (episode, attempt))]
        own = self.recorded[self.partitions[episode, attempt], episode, attempt]
        inherited = [] if own.fork is None else self.prefix(own.fork, self.run / "journal").bodies
        nothing = [b"", [], {"logprobs": b""}]
        context = [[*body[:6], body[6] + body[7][0], nothing, *body[8:]] for body in inherited]
        turns = [body for body in (*context, *bodies) if body[0] == "turn" and (body[1], body[2]) == (seat, agent)]
        return sorted(turns, key=lambda turn: turn[5])

    def add_group_scores(self) -> None:
        """Checks the scores of groups, and adds them to the rewards of `trajectories`, as credit does."""
        agents: dict[str, dict[tuple[Any, ...], Row]] = defaultdict(dict)
        ends = {
            (row["episode"], row["attempt"]): row["group_id"]
            for row in self.tables["episodes"]
            if row["purpose"] == "train" and row["drop_reason"] is None
        }
        for row in self.tables["trajectories"]:
            if (row["episode"], row["attempt"]) in ends and row["policy"] in self.trained:
                group = ends[row["episode"], row["attempt"]]
                agents[group][row["episode"], row["seat"], row["agent"]] = row
        added: dict[tuple[Any, ...], list[float]] = defaultdict(list)
        for row in self.tables["group_scores"]:
            scores = json.loads(row["scores"])
            told = {(episode, seat, agent) for episode, seat, agent, _ in scores}
            if told != set(agents[row["group_id"]]) or len(told) != len(scores):
                self.say("scores", f"{row['group_id']}: {row['scorer']} scored {scores}, which is not the whole group")
            for *agent, value in scores:
                if value is not None and row["weight"] is not None:
                    added[row["group_id"], *agent].append(value * row["weight"])
        for (group, *agent), values in added.items():
            if row := agents[group].get(tuple(agent)):
                own = [] if row["reward"] is None else [row["reward"]]
                row["reward"] = math.fsum([*own, *values])

    # --- rewards, baselines, advantages -------------------------------------------------------------------------------

    def judge_credit(self) -> None:
        committed = {
            (row["episode"], row["attempt"]): row
            for row in self.tables["episodes"]
            if row["purpose"] == "train" and row["drop_reason"] is None
        }
        credits = {lineage: config["credit"] for lineage, config in self.configs().items()}

        def life_of(lineage: int) -> int:
            return max(start for start in credits if start <= lineage)

        def has_means(lineage: int) -> bool:
            return bool((credits[life_of(lineage)].get("advantage") or {}).get("name") == "role_mean")

        expected = {start: self.expected(credit, committed, has_means) for start, credit in credits.items()}
        for row in self.tables["step_units"]:
            of = expected[life_of(row["lineage"])]
            if of is None:
                continue
            found = of.of(row)
            told = (row["advantage"], row["baseline"], json.loads(row["turn_advantages"] or "null"))
            if found is None or not _same(told, found, within=1e-12 * (1.0 + abs(row["baseline"]))):
                self.say("credit", f"{row['episode']} {row['seat']} in {_name(_version(row))}: {told}, and not {found}")

    def configs(self) -> dict[int, Mapping[str, Any]]:
        """The sections `credit` and `policies` of each start's configuration, by the lineage that the start began."""
        config = {name: self.config.get(name) or {} for name in ("credit", "policies")}
        found: dict[int, Mapping[str, Any]] = {0: config}
        for start in self.starts:
            config = copy.deepcopy(config)
            for change in start["changed"]:
                *sections, name = change["path"]
                section: Any = config
                for each in sections:
                    section = section.setdefault(each, {})
                section[name] = change["now"]
            found[start["lineage"]] = config
        return found

    def expected(
        self,
        credit: Mapping[str, Any],
        committed: Mapping[Attempt, Row],
        has_means: Callable[[int], bool],
    ) -> _Expected | None:
        """What the page gives under a section `credit`; None where it does not give the function."""
        options = dict(credit.get("advantage") or {})
        estimator = options.pop("name", "leave_one_out")
        if estimator not in ("leave_one_out", "group_mean", "group_std", "role_mean", "none", "gigpo"):
            return None
        if estimator == "role_mean":
            return self.role_means(committed, 0.8, has_means)
        if estimator == "gigpo":
            compared = [by_state(members, **options) for members in self.compared(committed).values()]
            by_agent = {agent: own for group in compared for agent, own in group.items()}
            return _Expected(lambda row: by_agent.get(agent_of(row)))
        if estimator == "none" and not self.branches(committed) and credit.get("turn_credit") != "to_go":
            return _Expected(lambda row: (row["reward"], 0.0, None))
        if estimator not in COMPARED:  # a function of the user's: only the sum can be recomputed
            return _Expected(
                lambda row: (
                    row["advantage"],
                    row["reward"] - row["advantage"],
                    json.loads(row["turn_advantages"] or "null"),
                )
            )
        is_whole, to_go = credit.get("release", "group") == "group", credit.get("turn_credit") == "to_go"
        if is_whole or estimator == "none":
            return self.whole_groups(committed, estimator, to_go=to_go, is_alone=not is_whole)
        return self.first_finishers(committed)

    def compared(self, committed: Mapping[Attempt, Row]) -> dict[tuple[str, str, str], list[Row]]:
        """Trajectories with a reward, by group, policy and seat."""
        compared: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
        for row in self.tables["trajectories"]:
            episode = committed.get((row["episode"], row["attempt"]))
            if episode is not None and row["reward"] is not None:
                compared[episode["group_id"], row["policy"], row["seat"]].append(row)
        return compared

    def branches(self, committed: Mapping[Attempt, Row]) -> dict[str, Row]:
        """The calls that started the committed branches, by the branch's id."""
        begun = ((key[0], self.recorded[row["partition"], *key].fork) for key, row in committed.items())
        return {name: fork for name, fork in begun if fork is not None and fork.get("branch")}

    def of_trees(self, members: list[Row], forks: dict[str, Row], estimator: str, *, to_go: bool) -> dict[Any, Credit]:
        """The credit of members of a group with branches; lost ones have none."""
        attempts = {row["episode"]: row["attempt"] for row in members if row["episode"] not in forks}
        own = {row["episode"]: forks[row["episode"]] for row in members if row["episode"] in forks}
        kept = {name: fork for name, fork in own.items() if attempts.get(fork["episode_id"]) == fork["attempt"]}
        rows = [row for row in members if row["episode"] not in own or row["episode"] in kept]
        agents = [(row["episode"], row["agent"]) for row in rows]
        rewards = [row["reward"] for row in rows]
        turn_rewards = [json.loads(row["turn_rewards"] or "[]") if to_go else [] for row in rows]
        of_seat = {
            name: {**fork, "turns": [each for each in fork["turns"] if each[0] == members[0]["seat"]]}
            for name, fork in kept.items()
        }
        whole = pieces(estimator, agents, rewards, of_seat)
        last = max((turn + 1 for given in turn_rewards for turn, _ in given), default=0)
        ends = max([last, *(first for own_pieces in whole for first, _, _ in own_pieces)])
        found: dict[Any, Credit] = {}
        for number, row in enumerate(rows):
            turns = range(ends + 1) if last else range(whole[number][-1][0] + 1)
            by_turn = []
            for now in turns:
                at = whole
                if last:
                    paid = [math.fsum(value for turn, value in given if turn < now) for given in turn_rewards]
                    left = [reward - before for reward, before in zip(rewards, paid, strict=True)]
                    at = pieces(estimator, agents, left, of_seat)
                by_turn.append(next(piece[1:] for piece in reversed(at[number]) if piece[0] <= now))
            is_alone = not last and len(whole[number]) == 1
            found[agent_of(row)] = (*by_turn[0], None if is_alone else [value for value, _ in by_turn])
        return found

    def whole_groups(
        self, committed: Mapping[Attempt, Row], estimator: str, *, to_go: bool, is_alone: bool = False
    ) -> _Expected:
        found: dict[Any, Credit] = {}
        forks = self.branches(committed)
        groups = list(self.compared(committed).values())
        for members in [[row] for group in groups for row in group] if is_alone else groups:
            if any(row["episode"] in forks for row in members):
                found |= self.of_trees(members, forks, estimator, to_go=to_go)
                continue
            episodes = [row["episode"] for row in members]
            rewards = [row["reward"] for row in members]
            turn_rewards = [json.loads(row["turn_rewards"] or "[]") for row in members]
            whole = advantages(estimator, rewards, episodes)
            by_turn: list[list[float]] | None = None
            if to_go and any(turn_rewards):
                by_turn = []
                for now in range(max(turn + 1 for given in turn_rewards for turn, _ in given) + 1):
                    paid = [math.fsum(value for turn, value in given if turn < now) for given in turn_rewards]
                    left = [reward - before for reward, before in zip(rewards, paid, strict=True)]
                    by_turn.append([value for value, _ in advantages(estimator, left, episodes)])
            for number, (row, (value, baseline)) in enumerate(zip(members, whole, strict=True)):
                turns = None if by_turn is None else [each[number] for each in by_turn]
                found[agent_of(row)] = (value, baseline, turns)
        return _Expected(lambda row: found.get(agent_of(row)))

    def first_finishers(self, committed: Mapping[Attempt, Row]) -> _Expected:
        compared = self.compared(committed)
        frozen = {row["group_id"]: row for row in self.tables["baselines"]}

        def of(row: Row) -> Credit | None:
            episode = committed.get((row["episode"], row["attempt"]))
            if episode is None or episode["group_id"] not in frozen:
                return None
            baselines = frozen[episode["group_id"]]
            finishers = json.loads(baselines["finishers"])
            others = [name for name in finishers if name != row["episode"]][: len(finishers) - 1]
            siblings = compared[episode["group_id"], row["policy"], row["seat"]]
            rewards = [other["reward"] for name in others for other in siblings if other["episode"] == name]
            means = [
                m
                for policy, seat, m in json.loads(baselines["earlier"])
                if (policy, seat) == (row["policy"], row["seat"])
            ]
            weight = KAPPA if means else 0.0
            if not rewards and not means:
                return 0.0, row["reward"], None
            baseline = (math.fsum(rewards) + weight * (means[0] if means else 0.0)) / (len(rewards) + weight)
            return row["reward"] - baseline, baseline, None

        return _Expected(of)

    def role_means(self, committed: Mapping[Attempt, Row], decay: float, has_means: Callable[[int], bool]) -> _Expected:
        """Replays the means along every lineage that has them: each agent is compared with those of the step that made
        the weights of its first token, or with the start of its role."""
        fed: dict[Version, list[Row]] = defaultdict(list)
        for row in sorted(self.tables["step_units"], key=lambda row: row["position"]):
            fed[_version(row)].append(row)
        began = {agent_of(row): row["oldest_step"] for row in self.tables["trajectories"]}
        versions = {_version(row): row for row in self.tables["versions"]}
        after: dict[Version, dict[tuple[str, str], list[tuple[int, float, float]]]] = {}
        found: dict[tuple[Any, ...], Credit] = {}
        for version in sorted(versions):
            policy, lineage, step = version
            if not has_means(lineage):
                continue
            row = versions[version]
            parent = None if row["parent_lineage"] is None else (policy, row["parent_lineage"], row["parent_step"])
            means = {role: list(known) for role, known in after.get(parent, {}).items()} if parent is not None else {}
            by_role: dict[tuple[str, str], list[Row]] = defaultdict(list)
            for each in fed[version]:
                episode = committed.get((each["episode"], each["attempt"]))
                by_role[episode["environment"] if episode else "", each["seat"]].append(each)
            for role, rows in by_role.items():
                for each in rows:
                    if role in means:
                        known = [mean for at, *mean in means[role] if at <= began[agent_of(each)]]
                        total, weight = known[-1]
                    else:
                        others = [other["reward"] for other in rows if other["episode"] != each["episode"]]
                        total, weight = math.fsum(others), len(others)
                    baseline = total / weight if weight else each["reward"]
                    found[(*version, *agent_of(each))] = (each["reward"] - baseline, baseline, None)
                if role not in means:
                    first = [each["reward"] for each in rows if each["episode"] != rows[-1]["episode"]]
                    means[role] = [(0, math.fsum(first), len(first))]
                    total, weight = 0.0, 0.0
                else:
                    _, total, weight = means[role][-1]
                total = decay * total + math.fsum(each["reward"] for each in rows)
                means[role].append((step, total, decay * weight + len(rows)))
            after[version] = means
        return _Expected(lambda row: found.get((*_version(row), *agent_of(row))))


def _row_digest(turns: Sequence[list[Any]], credit: Row, started: tuple[int, int], bound: int | None) -> bytes:
    """Over a row: its temperature, and its table. Tokens more than `bound` steps behind the
    version from which the step started are not trained."""
    by_turn = json.loads(credit["turn_advantages"] or "null") or [credit["advantage"]]
    has_kept = any("kept" in turn[7][2] for turn in turns)
    temperatures = set[float]()
    made = ("turn_index", "loss_mask", "advantages", "temperatures")
    table = [
        column
        for column in COLUMNS
        if column.name in made or (column.is_recorded and any(column.name in turn[7][2] for turn in turns))
    ]
    columns: dict[str, bytes] = {column.name: b"" for column in table}
    tokens, counts, kept, spans = b"", b"", b"", list[tuple[int, int, Any]]()
    for turn in turns:
        context, (sampled, spans_of_turn, recorded) = turn[6:8]
        size, at = len(sampled), len(tokens + context) // 4
        counts_of_turn, ids = recorded.get("kept", bytes(size))[:size], recorded.get("kept", b"")[size:]
        ages = [_lag(version, started) for start, stop, version in spans_of_turn for _ in range(start, stop)]
        trained = bytes(
            count != -1 and (bound is None or number >= len(ages) or ages[number] <= bound)
            for number, (count,) in enumerate(struct.iter_unpack("<i", counts_of_turn))
        )
        advantage = struct.pack("<f", by_turn[min(turn[5], len(by_turn) - 1)])
        tokens += context + sampled
        values = recorded | {
            "turn_index": struct.pack("<i", turn[5]) * (size // 4),
            "loss_mask": trained,
            "advantages": b"".join(advantage if each else bytes(4) for each in trained),
            "temperatures": struct.pack("<d", turn[11] or 1) * (size // 4),
        }
        temperatures |= {float(turn[11] or 1)} if any(trained) else set()
        for name, _, _, fill in table:
            columns[name] += fill * (len(context) // 4) + values.get(name, fill * (size // 4))
        counts, kept = counts + bytes(len(context)) + counts_of_turn, kept + ids
        for start, stop, version in spans_of_turn:
            begin = at + start
            if spans and spans[-1][1:] == (begin, version):
                begin = spans.pop()[0]
            spans.append((begin, at + stop, version))
    columns |= {"kept": counts + kept} if has_kept else {}
    temperature = temperatures.pop() if len(temperatures) == 1 else 0.0
    if temperature:
        del columns["temperatures"]
    content = msgspec.msgpack.encode([temperature, [tokens, spans, columns]])
    return hashlib.blake2b(content, digest_size=16).digest()


def _lag(version: Sequence[Any], started: tuple[int, int]) -> int:
    """Steps from a version to that from which a step started; at least 1 across lineages."""
    steps = max(0, started[1] - int(version[2]))
    return steps if version[1] == started[0] else max(1, steps)


class _Expected(NamedTuple):
    of: Callable[[Row], Credit | None]
    """Of a row of `step_units`; None where nothing can be said."""


def _state(body: Sequence[Any]) -> bytes:
    """The hash of a turn's anchor state."""
    said = body[19] if len(body) > 19 else None
    own = [each for each in body[10] if each["role"] != "system"]
    parts = [said] if said is not None else [part for each in own for part in (each["role"], each["content"])]
    framed = b"".join(len(part.encode()).to_bytes(4, "little") + part.encode() for part in parts)
    return hashlib.blake2b(framed, digest_size=8).digest()


def _same(told: Iterable[Any], found: Iterable[Any], within: float) -> bool:
    """Equal up to roundings."""
    for one, other in zip(told, found, strict=True):
        if isinstance(one, list) and isinstance(other, list):
            if len(one) != len(other) or not all(_same([a], [b], within) for a, b in zip(one, other, strict=True)):
                return False
        elif one is None or other is None:
            if one is not other:
                return False
        elif not math.isclose(one, other, rel_tol=1e-9, abs_tol=within):
            return False
    return True


def _version(row: Row) -> Version:
    return row["policy"], row["lineage"], row["step"]


def _tokens_of_endpoint(text: str, default: int) -> int:
    """The tokens that an endpoint counted, of a turn recorded as a line of JSON."""
    try:
        counted = json.loads(text)["usage"]["completion_tokens"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return default
    return counted if isinstance(counted, int) else default


def _name(version: Version) -> str:
    return f"{version[0]}@{version[1]}.{version[2]}"
