"""examples/notebook.ipynb runs from its first cell to its last, and its model learns."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

pytestmark = [pytest.mark.learning, pytest.mark.slow]


def test_the_notebook_trains_a_model_and_shows_its_curve(repository: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(repository / "examples" / "notebook.ipynb", as_version=4)
    assert len(notebook.cells) <= 25
    for cell in notebook.cells:
        cell.pop("outputs", None)
        if cell.cell_type == "code":
            cell.outputs = []
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    printed = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
    start, end = map(float, re.findall(r"^held-out reward: (\S+) → (\S+)$", printed, re.MULTILINE)[0])
    assert end >= start + 0.2
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1
    assert re.search(r"logprob +-\d\.\d+  sampled by solver@0\.\d", printed)
    assert re.search(r"^f3 reward ", printed, re.MULTILINE)
