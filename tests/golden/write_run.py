"""Write the golden run of the current journal format: `python -m tests.golden.write_run`.

It is a short sample run: two trained policies, children, an evaluation, a lost trainer and its rollback. The archive is
written once per format and never again, so that every later version must read what the first one wrote.
"""

from __future__ import annotations

import asyncio
import json
import lzma
import tarfile
import tempfile
from pathlib import Path

from agentrl.app.training import run_training
from agentrl.config.run import RunConfig
from agentrl.inspection.reader import RunReader
from agentrl.journal.entries import FORMAT
from tests.golden.read_run import archive_path, summarize, summary_path
from tests.support import sample_run
from tests.support.sample_environment import Propose, held_out_tasks

STEPS = 2
LOST_AT = ("solver", 2)
HELD_OUT = held_out_tasks()[:2]


def main() -> None:
    archive = archive_path(FORMAT)
    if archive.exists():
        raise SystemExit(f"{archive} exists, and must not change; a new format needs a new number")
    sample_run.LOST_AT = LOST_AT
    with tempfile.TemporaryDirectory() as directory:
        values = sample_run.sample_run_config(directory, "golden").model_dump(exclude_unset=True)
        values |= {"steps": STEPS, "evaluation": {"tasks": len(HELD_OUT)}}
        values["policies"]["proposer"]["step_size"] = 2
        values["policies"]["solver"]["step_size"] = 8
        config = RunConfig(**values)
        factories = sample_run.sample_run_factories(parked=True)
        path = Path(asyncio.run(run_training(config, Propose, held_out=HELD_OUT, quiet=True, factories=factories)).path)
        reader = RunReader(path)
        expected = summarize(reader)
        reader.close()
        for leftover in [*path.glob("journal/*-shm"), *path.glob("journal/*-wal"), *path.glob("journal/*.lock")]:
            leftover.unlink()
        with lzma.open(archive, "wb", preset=9) as stream, tarfile.open(fileobj=stream, mode="w") as tar:
            for name in ("config.json", "journal", "steps", "versions"):
                tar.add(path / name, arcname=name)
        summary_path(FORMAT).write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
