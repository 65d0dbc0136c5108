"""The package with one more column per token, followed from its engine to every place that reads or shows a token.

    python -m tests.new_column NAME DIRECTORY

Changes the sources that a new column costs while it imports them: its row and its field in `core/tokens.py`, and the
scripted engine, which records `token id / 256`. Then writes the sample run into DIRECTORY. The last line is JSON: for
each place, the problem found there, or "".
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FIELD = "    values: Float32Array | None = None\n"
ROW = '    Column("turn_index",'
PAGE_ROW = "  | `turn_index` |"
REPLY = "            logprobs=self._logprobs(request, len(tokens)),\n"
DELTA = "delta = Tokens(token_ids=tokens, logprobs=logprobs[first:stop], spans=spans)"
LOSS = """
import agentrl, torch

@agentrl.loss
def writes(batch):
    with torch.no_grad():
        batch.{name} += 1
    return -batch.advantages.detach() * batch.logprobs
"""


def change(module: str, changes: dict[str, str]) -> None:
    """Import a module from its source with replaced parts, each of which occurs once."""
    assert module not in sys.modules
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text(encoding="utf-8")
    for old, new in changes.items():
        assert source.count(old) == 1, (module, old)
        source = source.replace(old, new)
    sys.modules[module] = made = importlib.util.module_from_spec(spec)
    exec(compile(source, spec.origin, "exec"), made.__dict__)
    parent, _, child = module.rpartition(".")
    setattr(importlib.import_module(parent), child, made)


def add_column(name: str) -> None:
    """Make the changes that a column costs: its row, its field, and its engine."""
    row = f'    Column("{name}", "<f4", 0.0, is_recorded=True, in_loss="{name}"),\n'
    field = f"    {name}: Float32Array | None = None\n"
    change("agentrl.core.tokens", {ROW: row + ROW, FIELD: FIELD + field})
    delta = DELTA.replace("spans=spans", f"spans=spans, {name}=tokens.astype(np.float32) / 256")
    reply = f"            {name}=np.array(tokens, np.float32) / 256,\n"
    change("agentrl.engines.scripted", {REPLY: REPLY + reply, DELTA: delta})


def training(name: str, directory: Path, run: Path) -> Iterator[tuple[str, object]]:
    """Yield each place between the journal and the loss, and a false value where it has the column."""
    import numpy as np
    import torch

    from agentrl.core.records import PolicyVersion
    from agentrl.core.tokens import Tokens, TrainingSample
    from agentrl.credit.samples import row_digest
    from agentrl.inspection.reader import RunReader
    from agentrl.journal.rows import assemble_trajectories
    from agentrl.learn.loss_batch import LossBatch
    from agentrl.learn.step_columns import TokenColumns
    from agentrl.testing.function_check import check_loss

    reader = RunReader(run)
    entries, _ = reader.recorded(reader.episodes("status = trained and turns > 1", limit=1)[0])
    reader.close()
    row = next(row for trajectory in assemble_trajectories(entries) for row in trajectory.rows)
    values = np.where(row.loss_mask, row.token_ids.astype(np.float32) / 256, np.float32(0))
    yield "rows of the journal", not np.array_equal(getattr(row, name), values)

    advantages = row.loss_mask.astype(np.float32)
    table: Any = {field: getattr(row, field) for field in Tokens.__struct_fields__} | {"advantages": advantages}
    sample = TrainingSample(**table, episode_id="e0")
    other = sample.with_column(name, getattr(sample, name) + 1)
    yield "digest of a row", row_digest(sample) == row_digest(other)

    columns = TokenColumns.of([sample], PolicyVersion("solver", 0, 1), group_size=1)
    columns = TokenColumns.merge([TokenColumns.decode(columns.encode())])
    zeros = torch.zeros(len(columns))
    batch = LossBatch(columns.take(np.arange(len(columns))), logprobs=zeros, entropies=zeros)
    yield "batch of a loss", not np.array_equal(getattr(batch, name), values[row.loss_mask])
    loss = directory / "loss.py"
    loss.write_text(LOSS.format(name=name))
    yield "purity of a loss", f"it changed batch.{name}," not in " ".join(check_loss(f"{loss}:writes").findings)


def second_reader(name: str, run: Path) -> Iterator[tuple[str, object]]:
    """Yield what the second reader finds before and after its page has a row of the column."""
    from tests import journal_oracle

    page = journal_oracle.PAGE.read_text(encoding="utf-8")
    named = [problem for problem in journal_oracle.judge(run) if f"['{name}']" in problem]
    yield "second reader, before the page has the row", not named
    page = page.replace(PAGE_ROW, f"  | `{name}` | float32 | yes | 0 |\n{PAGE_ROW}")
    journal_oracle.COLUMNS = journal_oracle.columns_of(page)
    yield "second reader", journal_oracle.judge(run, ended=True)


def showing(name: str, directory: Path, run: Path) -> Iterator[tuple[str, object]]:
    """Yield each place that shows tokens, and a false value where it has the column."""
    import msgspec
    import pyarrow.parquet as parquet
    from rich.console import Console

    from agentrl.inspection.export.exporting import export
    from agentrl.inspection.reader import RunReader
    from agentrl.inspection.render_episode import tokens_page
    from agentrl.inspection.tokens import episode_tokens
    from agentrl.inspection.viewer.queries import answer_episode_queries

    reader = RunReader(run)
    export(reader, "jsonl", directory / "lines")
    export(reader, "parquet", directory / "table")
    episodes = [msgspec.json.decode(text) for text in (directory / "lines").read_bytes().splitlines()]
    exported = [row for episode in episodes for agent in episode["agents"] for row in agent["rows"]]
    rows = [row for row in parquet.read_table(directory / "table").to_pylist() if row["token_ids"]]
    yield "rows of both exports", not len(exported) == len(rows) > 100
    for kind, told in (("JSON lines", exported), ("Parquet", rows)):
        wrong = [row for row in told if dict(row["recorded"]).get(name) != shown(row["token_ids"], row["loss_mask"])]
        yield kind, wrong[:1]

    episode = reader.episodes("status = trained and turns > 1", limit=1)[0].episode
    view = episode_tokens(reader, episode)
    columns = [
        shown([token.id for token in row.tokens], [token.loss_mask for token in row.tokens]) for row in view.rows
    ]
    yield "episode tokens --json", [row.recorded.get(name) for row in view.rows] != columns
    console = Console(file=io.StringIO(), width=400, record=True)
    console.print(tokens_page(view, details=True))
    yield "episode tokens --details", name not in console.export_text()
    answer = answer_episode_queries(reader, {"episode": episode})["tokens"]["rows"]
    yield "viewer", [row["seat"] for row in answer if name not in row["recorded"]]
    reader.close()


def shown(token_ids: list[int], loss_mask: list[Any]) -> list[float | None]:
    """The column of a row, as exports and the viewer show it."""
    return [token / 256 if mask else None for token, mask in zip(token_ids, loss_mask, strict=True)]


def places(name: str, directory: Path) -> Iterator[tuple[str, object]]:
    """Yield each place, and a false value where it has the column."""
    from tests.support.sample_run import write_sample_run

    run = write_sample_run(directory).path
    yield from training(name, directory, run)
    yield from second_reader(name, run)
    yield from showing(name, directory, run)


if __name__ == "__main__":
    chosen = sys.argv[1]
    add_column(chosen)
    problems = {place: str(problem or "")[:500] for place, problem in places(chosen, Path(sys.argv[2]))}
    sys.stdout.write(json.dumps(problems) + "\n")
