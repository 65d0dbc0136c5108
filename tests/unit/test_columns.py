"""One list of columns: a new one reaches every place from its row, and a place that forgets it is named."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from agentrl.core.tokens import COLUMNS, Column, Completion, Tokens, TrainingSample, TrajectoryRow
from agentrl.learn.loss_batch import LossBatch
from benchmarks.code_shape import Module, column_lists, modules_of
from tests.journal_oracle import CODES, columns_of
from tests.loss_cases import batch_of

ROOT = Path(__file__).resolve().parents[2]
FORMAT = ROOT / "docs/reference/journal_format.md"
LOSSES = ROOT / "docs/how-to/own_losses.md"
TYPES = {"<f4": "float32", "<f8": "float64", "<i4": "int32", "|b1": "bool"}
NEW = Column("temperature", "<f4", 1.0, is_recorded=True, in_loss="temperature")


def test_a_column_reaches_every_place_from_its_row() -> None:
    """`temperature` is also a value of a turn, of an export's row, and of the trainer's micro-batch."""
    with tempfile.TemporaryDirectory(prefix="agentrl-column-") as directory:  # not judged by the page without its row
        command = [sys.executable, "-m", "tests.new_column", "temperature", directory]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    places = json.loads(done.stdout.splitlines()[-1])
    assert len(places) == 12
    assert {place: f"temperature: {problem}" for place, problem in places.items() if problem} == {}


def page_problems(columns: Iterable[Column], page: str) -> list[str]:
    """Columns whose row of the journal's format is missing or says something else."""
    rows = {row.name: (row.code, row.is_recorded, row.fill) for row in columns_of(page)}
    expected = {
        column.name: (
            CODES[TYPES[column.dtype]],
            column.is_recorded,
            b"" if column.fill is None else torch.tensor(column.fill).numpy().astype(column.dtype).tobytes(),
        )
        for column in columns
    }
    return [name for name in expected | rows if rows.get(name) != expected.get(name)]


def loss_problems(columns: Iterable[Column], attributes: Mapping[str, object], page: str) -> list[str]:
    """Columns of losses that `LossBatch` does not declare for the type checker, or the page does not list."""
    listed = set(re.findall(r"`(\w+)`", page))
    return [column.in_loss for column in columns if column.in_loss and column.in_loss not in attributes.keys() & listed]


def field_problems(columns: Iterable[Column], kinds: Iterable[type[Tokens]]) -> list[str]:
    """Columns without a field of `Tokens`, and columns whose name a field of a kind of table takes."""
    names = {column.name for column in columns}
    missing = names - set(Tokens.__struct_fields__)
    added = [set(kind.__struct_fields__) - set(Tokens.__struct_fields__) for kind in kinds]
    return sorted(missing | names.intersection(*[set.union(*added)]))


def test_pages_and_declarations_list_the_columns_of_the_table() -> None:
    format_page, losses_page = FORMAT.read_text(), LOSSES.read_text()
    assert page_problems(COLUMNS, format_page) == []
    assert [row.name for row in columns_of(format_page)] == [column.name for column in COLUMNS], (
        "digests have its order"
    )
    assert loss_problems(COLUMNS, LossBatch.__annotations__, losses_page) == []
    assert field_problems(COLUMNS, [Completion, TrajectoryRow, TrainingSample]) == []


def test_a_column_that_a_page_or_declaration_forgets_is_named() -> None:
    format_page, losses_page = FORMAT.read_text(), LOSSES.read_text()
    columns = (*COLUMNS, NEW)
    assert page_problems(columns, format_page) == ["temperature"]
    assert page_problems(COLUMNS[1:], format_page) == ["logprobs"]
    assert loss_problems(columns, LossBatch.__annotations__, losses_page) == ["temperature"]
    assert field_problems(columns, [TrajectoryRow]) == ["temperature"]


@pytest.mark.parametrize(
    "planted",
    [
        'COLUMNS = ("logprobs", "turn_index", "loss_mask")',
        'columns = {"behavior_logprobs": 1, "advantages": 2, "lags": 3}',
        'NAMES = ["row", *("logprobs", "kept"), "experts"]',
        "class Rows:\n    token_ids: list\n    logprobs: list\n    loss_mask: list",
    ],
)
def test_a_planted_list_of_columns_is_found(tmp_path: Path, planted: str) -> None:
    (tmp_path / "second.py").write_text(planted)
    assert [found.split(":")[0].rpartition(".")[2] for found in column_lists(modules_of(tmp_path))] == ["second"]


def test_the_table_is_the_one_list_of_columns(package_modules: list[Module]) -> None:
    assert [found.split(":")[0] for found in column_lists(package_modules)] == ["agentrl.core.tokens"]


def test_no_column_hides_another_part_of_the_batch() -> None:
    """The columns are attributes of the batch beside the model's outputs and the methods."""
    batch = batch_of([-1.0], [-1.0], [1.0])
    names = [column.in_loss for column in COLUMNS if column.in_loss]
    assert len(names) == len(set(names))
    for name in names:
        assert isinstance(getattr(batch, name), torch.Tensor)


@pytest.mark.parametrize("column", [column.name for column in COLUMNS if column.fill is not None])
def test_a_table_refuses_a_column_of_another_length(column: str) -> None:
    table = Tokens(token_ids=np.zeros(2, np.int32), logprobs=np.zeros(2, np.float32))
    with pytest.raises(ValueError, match=f"2 tokens but 3 {column}"):
        table.with_column(column, np.zeros(3))
