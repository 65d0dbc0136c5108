"""What installing agentrl brings along."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

from benchmarks.newcomer import core_packages

ROOT = Path(__file__).parents[2]

MAX_CORE_PACKAGES = 25


def test_the_core_installs_few_packages_and_no_heavy_one() -> None:
    packages = core_packages()
    assert {"aiohttp", "gymnasium", "numpy", "pydantic"} <= packages
    assert not packages & {"torch", "ray", "transformers", "peft", "vllm"}
    assert len(packages) <= MAX_CORE_PACKAGES, sorted(packages)


@pytest.mark.parametrize("builder", [SdistBuilder, WheelBuilder])
def test_a_tree_without_symbolic_links_is_refused(
    tmp_path: Path, builder: type[SdistBuilder] | type[WheelBuilder]
) -> None:
    """As `git clone -c core.symlinks=false` leaves it: the link is a file with the path it led to."""
    (tmp_path / "agentrl").mkdir()
    (tmp_path / "examples").mkdir()
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "agentrl/__init__.py"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    link = tmp_path / "agentrl" / "environments"
    link.write_text("../environments")
    made = builder(str(tmp_path)).build(directory=str(tmp_path / "dist"), versions=["standard"])
    with pytest.raises(RuntimeError, match="without symbolic links"):
        list(made)
    link.unlink()
    link.mkdir()
    (link / "__init__.py").touch()
    made = builder(str(tmp_path)).build(directory=str(tmp_path / "dist"), versions=["standard"])
    assert [Path(path).is_file() for path in made] == [True]
