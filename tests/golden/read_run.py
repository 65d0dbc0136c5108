"""The golden runs: an archive per journal format, and what a reader must find in that of the current one."""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from agentrl.inspection.reader import RunReader
from agentrl.journal.entries import RewardEntry, TurnEntry

GOLDEN = Path(__file__).parent


def archive_path(version: int) -> Path:
    """The archived run of a journal format."""
    return GOLDEN / f"journal_{version}.tar.xz"


def summary_path(version: int) -> Path:
    """The JSON file with the summary of that run, as its writer read it."""
    return GOLDEN / f"journal_{version}.json"


def extract(version: int, directory: Path) -> Path:
    """Extract the run of a journal format into `directory`, and return its path."""
    with tarfile.open(archive_path(version)) as tar:
        tar.extractall(directory, filter="data")
    return directory


def summarize(reader: RunReader) -> dict[str, Any]:
    """Every episode with its outcome and a digest of its entries, by episode and attempt.

    The digest covers values that every reader of the format must find. Fields added later do not change it.
    """
    summary = {}
    for line in reader.episodes(sort="admitted_at", descending=False, limit=1000):
        episode = reader.episode(line.episode, line.attempt)
        rewards = [agent.reward for agent in episode.agents if agent.reward is not None]
        summary[f"{line.episode}.{line.attempt}"] = {
            "status": line.status,
            "reward": sum(rewards) if rewards else None,
            "turns": line.turns,
            "tokens": line.tokens,
            "entries": _digest(episode.entries),
        }
    return summary


def _digest(entries: Iterable[tuple[str, object]]) -> str:
    content = [(call, type(entry).__name__, *_values(entry)) for call, entry in entries]
    return hashlib.sha256(msgspec.json.encode(content)).hexdigest()[:16]


def _values(entry: object) -> list[object]:
    if isinstance(entry, TurnEntry):
        tokens = entry.tokens
        spans = [(span.start, span.stop, *span.version) for span in tokens.spans]
        return [entry.text, entry.finish_reason, tokens.token_ids, tokens.columns["logprobs"], spans]
    if isinstance(entry, RewardEntry):
        return [entry.seat, entry.value, entry.turn, entry.name]
    return []
