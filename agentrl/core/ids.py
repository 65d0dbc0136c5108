"""Deterministic ids and random streams: a restarted run uses the same names and draws the same numbers.

Root episode `k` is `e<k>` (evaluation: `v<k>`, fork: `f<k>`). A child's id is (parent, attempt, spawn call, index). The
id of a branch (`ctx.branch`) is (main episode, attempt, call, `b` and its number from 1). A call id belongs to a
strand of an episode's program, never to a global order: `strand#n`, where the root strand is `r` and the k-th
coroutine of the gather at call `r#3` is the strand `r/3.k`. A turn that an external agent requests is `seat:hash.n`:
the hash of the request, and the number of equal requests before it. A score is `seat.index.turn?scorer`, or
`seat.index?scorer` for a whole conversation. Random streams are keyed, so that one strand's draws cannot shift
another's.
"""

from __future__ import annotations

import hashlib
import random
import re
import uuid
import zlib

_NUMBER = re.compile(r"\d+")
_BRANCH = re.compile(r"~[^~]*\.b\d+$")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

ROOT_STRAND = "r"


def episode_id(purpose_prefix: str, number: int) -> str:
    """The id of root episode `number`; `purpose_prefix` is one of `e`, `v`, `f`."""
    return f"{purpose_prefix}{number}"


def child_episode_id(parent_id: str, attempt: int, spawn_call: str, index: int) -> str:
    """The id of a child episode; stable, so that a resumed parent finds its children."""
    return f"{parent_id}~{attempt}.{spawn_call}.{index}"


def branch_episode_id(main_id: str, attempt: int, branch_call: str, number: int) -> str:
    """The id of branch `number`, from 1, that a call of `ctx.branch` started; stable, as `child_episode_id`."""
    return f"{main_id}~{attempt}.{branch_call}.b{number}"


def main_episode_id(episode_id: str) -> str:
    """The id of the episode from which a branch was started; any other episode's own id.

    Example:
        >>> main_episode_id("e17~0.r#8.b1"), main_episode_id("e17~0.r#8.1")
        ('e17', 'e17~0.r#8.1')
    """
    return _BRANCH.sub("", episode_id)


def child_depth(episode_id: str) -> int:
    """The number of an episode's ancestors that spawned a child to start it; branches do not count.

    Example:
        >>> child_depth("e17"), child_depth("e17~0.r#8.b1"), child_depth("e17~0.r#8.b1~0.r#9.0")
        (0, 0, 1)
    """
    _, *calls = episode_id.split("~")
    return sum(not _BRANCH.search(f"~{call}") for call in calls) if calls else 0


def spawned_group_id(parent_id: str, attempt: int, spawn_call: str) -> str:
    """The id of the group of children that a call spawned."""
    return f"{parent_id}~{attempt}.{spawn_call}"


def group_id_of(episode_id: str, group_size: int) -> str:
    """The id of the group that an episode belongs to: that of its spawn, or of its root's task. A branch belongs to the
    group of its main episode.

    Example:
        >>> group_id_of("e17", 8), group_id_of("e17~0.r#3.1", 8), group_id_of("e17~0.r#8.b1", 8)
        ('g16', 'e17~0.r#3', 'g16')
    """
    main_id = main_episode_id(episode_id)
    parent_part, _, _ = main_id.rpartition(".")
    number = root_episode_number(main_id)
    return parent_part or f"g{number - number % group_size}"


def call_id(strand: str, number: int) -> str:
    """The id of call `number` (from 0) on `strand`."""
    return f"{strand}#{number}"


def has_call_number(call_id: str) -> bool:
    """Whether a call has a number on its strand; notes between calls have none."""
    return call_id.rpartition("#")[2].isdecimal()


def score_call_id(seat: str, index: int, turn: int | None, scorer: str) -> str:
    """The id of a score of an agent's turn, or of its whole conversation (None)."""
    return f"{seat}.{index}{'' if turn is None else f'.{turn}'}?{scorer}"


def is_score(call_id: str) -> bool:
    """Whether a call id is that of a score."""
    return "?" in call_id


def root_episode_id(episode_id: str) -> str:
    """The id of the root episode that an episode descends from.

    Example:
        >>> root_episode_id("e12~0.r#3.1")
        'e12'
    """
    return episode_id.partition("~")[0]


def root_episode_number(episode_id: str) -> int:
    """The number of the root episode that an episode descends from.

    Example:
        >>> root_episode_number("e12~0.r#3.1")
        12
    """
    return int(root_episode_id(episode_id)[1:])


def episode_sort_key(episode_id: str) -> tuple[int, ...]:
    """Sort key: root number, attempt, call id, index, compared as numbers.

    Example:
        >>> sorted(["e10", "e9~0.r#2.0", "e9"], key=episode_sort_key)
        ['e9', 'e9~0.r#2.0', 'e10']
    """
    return tuple(map(int, _NUMBER.findall(episode_id)))


def stable_hash64(*parts: object) -> int:
    """A 64-bit key from the text of `parts`: equal parts give equal keys in every process.

    Example:
        >>> stable_hash64(0, "e1", "r#0") == stable_hash64(0, "e1", "r#0")
        True
    """
    text = "\x1f".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def opening_digest(token_ids: bytes) -> int:
    """A key of the first context of a conversation, as `int32`; never 0. Fast, because every conversation has one."""
    return zlib.crc32(token_ids) + 1


def random_stream(*key: object) -> random.Random:
    """The random stream of `key` (run seed, episode, strand, …).

    Example:
        >>> random_stream(0, "e1").random() == random_stream(0, "e1").random()
        True
    """
    return random.Random(stable_hash64(*key))


def seeded_uuid4(source: random.Random) -> str:
    """A UUID (version 4) drawn from a stream."""
    return str(uuid.UUID(int=source.getrandbits(128), version=4))


def is_safe_name(name: str) -> bool:
    """Whether `name` may become part of a path or an adapter name."""
    return _NAME.fullmatch(name) is not None
