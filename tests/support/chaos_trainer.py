"""The trainer of the chaos runs, in a process of its own: its weights are a digest of all that it was trained on.

Speaks JSON lines over its standard streams. A checkpoint of it says which units made it, in order, so that the journal
can be held against it by somebody who trusts neither.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

from agentrl.core.parent_death import die_with_parent

STATE_FILE = "trained.json"


class DigestTrainer:
    """What the process does."""

    def __init__(self, directory: Path, policies: list[str]) -> None:
        self._versions = directory / "versions"
        self._states: dict[str, dict[str, Any]] = {
            policy: {"step": 0, "weights": "base", "units": []} for policy in policies
        }
        self._batches: dict[str, list[list[Any]]] = {}
        self._version = {policy: [policy, 0, 0] for policy in policies}

    def start(self, resume_from: str | None) -> None:
        if resume_from is not None:
            self._states = json.loads((Path(resume_from) / STATE_FILE).read_text())

    def forward_backward(self, policy: str, step_id: int, units: list[list[Any]]) -> None:
        assert step_id == self._states[policy]["step"] + 1, (policy, step_id, self._states[policy]["step"])
        self._batches[policy] = units
        threading.Event().wait(0.01)  # not time.sleep, which libfaketime breaks

    def optim_step(self, policy: str, step_id: int) -> dict[str, Any]:
        state, units = self._states[policy], self._batches.pop(policy)
        state["step"] = step_id
        state["weights"] = hashlib.sha256(json.dumps([state["weights"], units]).encode()).hexdigest()
        state["units"] += [[step_id, *unit] for unit in units]
        return {"started_from": self._version[policy], "digest": state["weights"], "samples": len(units)}

    def publish(self, policy: str, version: list[Any]) -> dict[str, str]:
        self._version[policy] = version
        target = self._versions / policy / f"{version[1]}.{version[2]}"
        partial = target.with_name(f".{target.name}.{os.getpid()}")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        content = self._states[policy]["weights"].encode()
        (partial / "weights").write_bytes(content)
        try:
            partial.rename(target)
        except OSError:
            assert (target / "weights").read_bytes() == content, f"{version} exists with other weights"
            shutil.rmtree(partial)
        return {"path": str(target), "sha256": hashlib.sha256(content).hexdigest()}

    def save(self, directory: str) -> None:
        path = Path(directory) / STATE_FILE
        with path.open("x") as file:
            json.dump(self._states, file)
            file.flush()
            os.fsync(file.fileno())


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    trainer = DigestTrainer(Path(sys.argv[2]), sys.argv[3:])
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        answer = getattr(trainer, method)(*arguments)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
