"""Checks of models at the start are made once for the same weights, code and machine."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.core import known_checks
from agentrl.core.errors import ModelError
from agentrl.core.known_checks import known_result
from agentrl.engines.embedded import forward
from agentrl.learn.forward_check import why_unshared
from agentrl.learn.models import LoadedBase  # noqa: F401 (registers the attention over a prefix tree)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repository: Path) -> Path:
    """A model of this test alone, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Path(shutil.copytree(repository / "environments/calculator/model", tmp_path / "model"))


def load(directory: Path, **options: Any) -> Any:
    return forward.load_model(str(directory), max_context=64, device="cpu", **{"dtype": torch.float32, **options})


def test_the_checks_of_a_start_are_made_once(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        model = load(directory)
        check = partial(forward.check_slots_match_forward, model, str(directory), max_context=64)
        assert known_result("slots", directory, model, 64, check) == ""
        assert why_unshared(model, 64, directory) == ""
        attention = model.config._attn_implementation
        monkeypatch.setattr(forward, "_largest_difference", lambda *_: pytest.fail("checked again"))
        monkeypatch.setattr("agentrl.learn.forward_check._mismatch", lambda *_, **__: pytest.fail("again"))
    assert attention == model.config._attn_implementation, "the attention that the result asks for"


def test_another_model_context_or_code_is_checked_again(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def result(model: Any, max_context: int = 64, check: str = "slots") -> str:
        return known_result(check, directory, model, max_context, lambda: made.append(check) or str(len(made)))

    model = load(directory)
    assert (result(model), result(model)) == ("1", "1")
    assert result(model, check="shared prefixes") == "2"
    assert result(model, max_context=32) == "3"
    assert result(load(directory, dtype=torch.bfloat16)) == "4"
    (directory / "generation_config.json").write_text("{ }")
    assert result(model) == "5"
    monkeypatch.setattr(known_checks, "_PACKAGE", directory)
    assert result(model) == "6"
    assert result(model) == "6"


def test_a_refusal_is_not_kept(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(directory)
    check = partial(forward.check_slots_match_forward, model, str(directory), max_context=64)
    with monkeypatch.context() as patched:
        patched.setattr(forward, "_largest_difference", lambda *_: 1.0)
        with pytest.raises(ModelError, match="computes different logits"):
            known_result("slots", directory, model, 64, check)
    assert known_result("slots", directory, model, 64, check) == ""


def test_a_cache_that_cannot_be_written_keeps_nothing(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(directory / "config.json"))
    results = iter("ab")
    assert [known_result("slots", directory, load(directory), 64, lambda: next(results)) for _ in range(2)] == [*"ab"]
