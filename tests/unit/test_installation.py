"""The command that installs an extra names where this copy came from, never the name on an index."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.machine import install_command


@pytest.fixture
def installed_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make Python find an agentrl that pip wrote this origin of."""

    def record(origin: object) -> None:
        directory = tmp_path / "episodic_rl-9.dist-info"
        directory.mkdir()
        (directory / "METADATA").write_text("Metadata-Version: 2.1\nName: episodic-rl\nVersion: 9\n")
        if origin is not None:
            (directory / "direct_url.json").write_text(json.dumps(origin))
        monkeypatch.syspath_prepend(str(tmp_path))

    return record


def test_a_checkout_is_installed_again_with_its_constraints(installed_from: Any, tmp_path: Path) -> None:
    checkout = tmp_path / "my agentrl"
    checkout.mkdir()
    (checkout / "constraints.txt").touch()
    installed_from({"url": checkout.as_uri(), "dir_info": {"editable": True}})
    pins = str(checkout / "constraints.txt")
    expected = [sys.executable, "-m", "pip", "install", "-c", pins, "-e", f"{checkout}[train,ray]"]
    assert shlex.split(install_command("train,ray")) == expected


def test_a_wheel_is_named_by_its_file(installed_from: Any, tmp_path: Path) -> None:
    wheel = tmp_path / "episodic_rl-9-py3-none-any.whl"
    installed_from({"url": wheel.as_uri(), "archive_info": {}})
    assert shlex.split(install_command("games"))[-1] == f"{wheel}[games]"
    assert shlex.split(install_command())[-1] == str(wheel)


@pytest.mark.parametrize("origin", [None, {"url": "https://example.org/agentrl.git"}, ["no", "object"]])
def test_an_unknown_origin_is_left_to_the_reader(installed_from: Any, origin: object) -> None:
    installed_from(origin)
    assert shlex.split(install_command("games"))[-1] == "episodic-rl[games]"
