"""What stays on disk: the newest few published versions of each policy, and as much of the journal's past as is wanted.

A version's files are needed while an engine may load them again; checkpoints hold weights of their own, and the link
`policies/NAME` points at the newest. A version that an evaluation pins is kept by the engine in memory. What a journal
gives up, and why that is safe, is `journal/pruning.py`'s; here stands when it does.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Literal

from agentrl.core.errors import StorageError
from agentrl.core.files import LOCAL, Disk, remedy
from agentrl.core.records import PolicyVersion, WeightsRef
from agentrl.core.words import plural
from agentrl.journal.port import JournalStore, PruneRule
from agentrl.orchestrator.manifest import CheckpointWriter

_NAME = re.compile(r"(\d+)\.(\d+)")


class VersionRetention:
    """Deletes what falls out of the window, whichever life of the run wrote it.

    Args:
        keep: how many of the newest versions of each policy stay; 0 keeps all.
        disk: where they lie.
    """

    def __init__(self, *, keep: int, disk: Disk = LOCAL) -> None:
        self._keep = keep
        self._disk = disk

    async def published(self, weights: WeightsRef, pinned: Collection[PolicyVersion] = ()) -> None:
        """A version became current; those that are `pinned` stay for now."""
        if self._keep:
            policy = weights.version.policy
            stay = {(version.lineage, version.step) for version in pinned if version.policy == policy}
            await self._disk.apart(lambda: self._prune(Path(weights.path).parent, stay))

    def _prune(self, directory: Path, stay: Collection[tuple[int, int]]) -> None:
        for lineage, step in versions_in(directory, disk=self._disk)[: -self._keep]:
            if (lineage, step) not in stay:
                self._disk.remove_tree(directory / f"{lineage}.{step}")


def versions_in(directory: Path, *, disk: Disk = LOCAL) -> list[tuple[int, int]]:
    """Lineage and step of each version of a policy that lies in its directory, oldest first."""
    matches = [_NAME.fullmatch(name) for name in disk.names(directory)]
    return sorted((int(match[1]), int(match[2])) for match in matches if match)


MIB = 1 << 20
NEARLY_FULL = 0.9
"""Share of the budget from which on the run says that it is nearly used up."""
MEASUREMENTS = 3
"""Sizes known before the growth of a journal is said."""


class JournalRetention:
    """Prunes the journal after checkpoints, beside the loop, and holds it to its budget.

    Args:
        store: the run's journal.
        checkpoints: who writes the run's checkpoints; None: there are none, and nothing is given up.
        keep: `journal.keep`.
        budget_mib: `journal.budget_mib`.
        size: bytes that journal and step columns take; blocks.
        warn: told when the budget will not do.
        disk: where they lie.
    """

    def __init__(
        self,
        store: JournalStore,
        checkpoints: CheckpointWriter | None,
        *,
        keep: Literal["all"] | int = "all",
        budget_mib: int = 0,
        size: Callable[[], int] = lambda: 0,
        warn: Callable[[str], None] = lambda _: None,
        disk: Disk = LOCAL,
    ) -> None:
        self._store = store
        self._checkpoints = checkpoints
        self._keep = keep
        self._budget = budget_mib * MIB
        self._size = size
        self._warn = warn
        self._disk = disk
        self._pruning: asyncio.Task[None] | None = None
        self._is_asked = self._is_ending = False
        self._steps = 0
        self._sizes: deque[tuple[int, int]] = deque(maxlen=16)
        """Steps taken, and bytes then: after each pruning, or where nothing is pruned, after each step."""
        self._warned: set[str] = set()

    def checkpointed(self, fail: Callable[[BaseException], None]) -> None:
        """A checkpoint was written: give up what no longer is needed; where that is being done, once more after it.

        Args:
            fail: told of what ended it: the disk refused, say.
        """
        if self._checkpoints is None or self._keep == "all":
            return
        self._is_asked = True
        if self._pruning is None or self._pruning.done():
            self._pruning = asyncio.get_running_loop().create_task(self._prune(self._keep, fail), name="prune")

    async def _prune(self, keep: int, fail: Callable[[BaseException], None]) -> None:
        assert self._checkpoints is not None
        try:
            while self._is_asked and not self._is_ending:
                self._is_asked = False
                sealed = await self._disk.apart(self._checkpoints.sealed)
                await self._store.prune(PruneRule(keep=keep, sealed=sealed), stopped=lambda: self._is_ending)
                if self._budget:
                    self._sizes.append((self._steps, await self._disk.apart(self._size)))
        except OSError as error:
            fail(StorageError(f"checkpoints: {error.strerror or error}; {remedy(error)}, then resume with --resume"))
        except Exception as error:  # noqa: BLE001 - nobody awaits this task for its result
            fail(error)

    async def wait(self) -> None:
        """Wait until what is being given up is gone."""
        if self._pruning is not None:
            await asyncio.wait({self._pruning})

    async def end(self) -> None:
        """Leave the rest to the next pruning. Idempotent."""
        self._is_ending = True
        await self.wait()

    async def stepped(self, steps_left: int) -> bool:
        """An optimizer step was taken: say so when the budget will not do; whether it is used up.

        Args:
            steps_left: of all policies, until the run's end.
        """
        self._steps += 1
        if not self._budget:
            return False
        used = await self._disk.apart(self._size)
        if self._keep == "all":
            self._sizes.append((self._steps, used))
        self._forecast(used, steps_left)
        return used > self._budget

    def _forecast(self, used: int, steps_left: int) -> None:
        told = f"journal and step columns take {_mib(used)} of journal.budget_mib = {self._budget // MIB}"
        advice = "raise it, or give up more with journal.keep (docs/operations.md, Disk)"
        if used > NEARLY_FULL * self._budget and "full" not in self._warned:
            self._warned |= {"full", "growth"}
            self._warn(f"{told}; {advice}")
        if len(self._sizes) < MEASUREMENTS or "growth" in self._warned:
            return
        (first, before), (last, now) = self._sizes[0], self._sizes[-1]
        growth = (now - before) / max(last - first, 1)
        if growth > 0 and (self._budget - used) / growth < steps_left:
            self._warned.add("growth")
            steps = max(int((self._budget - used) / growth), 0)
            self._warn(
                f"{told}, and {_mib(growth)} more with each step: it is used up in about {plural(steps, 'step')}, and "
                f"the run has {steps_left} to go; {advice}"
            )

    async def check(self) -> None:
        """After a checkpoint: is there room again?

        Raises:
            StorageError: the rule could not make any.
        """
        await self.wait()
        used = await self._disk.apart(self._size)
        if used > self._budget:
            raise StorageError(
                f"journal and step columns take {_mib(used)}, more than journal.budget_mib = {self._budget // MIB}, "
                f"and journal.keep = {self._keep} gives up no more of them. A checkpoint was written, so nothing is "
                "lost: raise the budget or lower journal.keep, then start again with --resume"
            )


def _mib(size: float) -> str:
    return f"{size / MIB:.3g} MiB"
