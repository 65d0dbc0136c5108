"""The viewer's page without a browser: closed to all but its own script, which makes no markup of text; its answers."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from agentrl.cli.main import main
from agentrl.core.errors import InputError
from agentrl.inspection.reader import RunReader
from agentrl.inspection.viewer import page
from agentrl.inspection.viewer.queries import QUESTIONS, answer_viewer_query, as_json
from tests.journal_cases import HOSTILE, write_run

VIEWER = Path(page.__file__).parent
SINKS = (
    r"innerHTML|outerHTML|insertAdjacentHTML|createContextualFragment|DOMParser|srcdoc|document\.write|setHTML"
    r"|\beval\b|new Function|setTimeout\([\"'`]|javascript:|\bon\w+\s*=\s*[\"'`]|importScripts|\bimport\("
)


class Elements(HTMLParser):
    """The elements of a page, each with its attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None], list[str]]] = []
        self._is_open = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs), []))
        self._is_open = True

    def handle_endtag(self, tag: str) -> None:
        self._is_open = False

    def handle_data(self, data: str) -> None:
        if self._is_open:
            self.found[-1][2].append(data)


def blocks(html: str) -> list[bytes]:
    packed = [text for _, given, text in Elements(html).found if given.get("class") == "block"]
    return [gzip.decompress(base64.b64decode("".join(text), validate=True)) for text in packed]


@pytest.mark.parametrize("html", [page.viewer_page().html, page.self_contained_page([gzip.compress(b"{}")])])
def test_the_policy_lets_in_this_script_and_this_style_and_nothing_else(html: str) -> None:
    elements = Elements(html).found
    [policy] = [given["content"] for tag, given, _ in elements if given.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    assert "require-trusted-types-for 'script'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"https?:|data:|blob:|\*", policy)
    for tag in ("script", "style"):
        [text] = ["".join(text) for name, given, text in elements if name == tag and given.get("class") != "block"]
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert not [name for _, given, _ in elements for name in given if name.startswith("on") or name in ("src", "style")]


def test_an_exported_page_asks_nobody_and_a_served_one_its_server() -> None:
    assert "connect-src" not in page.self_contained_page([b""])
    assert "connect-src 'self'" in page.viewer_page().policy
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg\")", page.viewer_page().html)


def test_the_page_holds_every_module_and_none_makes_markup_of_text() -> None:
    modules = {path.stem: path.read_text(encoding="utf-8") for path in VIEWER.glob("*.js")}
    assert set(modules) == set(page.MODULES)
    for place, name in enumerate(page.MODULES):
        assert not re.search(SINKS, modules[name]), name
        assert modules[name].startswith("// "), f"{name} does not say what it is for"
        imported = set(re.findall(r'from "\./(\w+)\.js"', modules[name]))
        assert imported <= set(page.MODULES[:place]), name
        is_dom = name == "dom"
        assert ("createElement" in modules[name] or "createTextNode" in modules[name]) == is_dom, name
    assert "</script" not in page.viewer_page().html.rpartition("</script>")[0].rpartition("<script")[2]


def test_content_lies_in_an_exported_page_as_base64_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(write_run(tmp_path / "run", text=HOSTILE, name=HOSTILE))
    out = tmp_path / "run.html"
    assert main(["run", "export", str(tmp_path / "run"), "--to", "html", "--out", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["episodes"] == 7
    html = out.read_text(encoding="utf-8")
    for part in ("TABLE episodes", "[bold]", "\u202e", "\x1b"):
        assert part not in html
    index, *rest = map(json.loads, blocks(html))
    episode = rest[index["blocks"]["episode e1 0"] - 1]
    assert episode["conversation"]["acts"][0]["text"] == HOSTILE
    assert set(episode) == {"conversation", "tokens", "reasons"}


def test_the_sample_run_s_page_answers_what_the_page_asks(sample_run: Path, tmp_path: Path) -> None:
    out = tmp_path / "sample.html"
    assert main(["run", "export", str(sample_run), "--to", "html", "--out", str(out), "--where", "reward < 0"]) == 0
    index, *rest = map(json.loads, blocks(out.read_text(encoding="utf-8")))
    reader = RunReader(sample_run)
    assert len(rest[index["blocks"]["episodes"] - 1]) == reader.count("reward < 0") < index["all"] == reader.count()
    assert {
        f"step {step['policy']} {step['lineage']} {step['step']}" for step in rest[index["blocks"]["steps"] - 1]
    } < set(index["blocks"])
    assert "episode forks/f0 0" in index["blocks"]
    assert rest[index["blocks"]["evaluations"] - 1] == json.loads(answer_viewer_query(reader, "evaluations", {}))
    reader.close()


def test_questions_are_answered_for_episodes_and_forks(sample_run: Path) -> None:
    reader = RunReader(sample_run)
    assert json.loads(answer_viewer_query(reader, "conversation", {"episode": "e1"}))["summary"]["episode"] == "e1"
    assert (
        json.loads(answer_viewer_query(reader, "conversation", {"episode": "forks/f0"}))["summary"]["purpose"] == "fork"
    )
    [row] = json.loads(answer_viewer_query(reader, "tokens", {"episode": "e1"}))["rows"]
    assert row["count"] == len(row["columns"]["id"]) == len(row["columns"]["loss_mask"])
    assert "kept" not in row["columns"], "of which nothing is known"
    found = json.loads(
        answer_viewer_query(
            reader, "episodes", {"where": "reward < 0", "limit": "3", "sort": "reward", "ascending": "1"}
        )
    )
    assert len(found["lines"]) == 3 < found["total"]
    assert json.loads(answer_viewer_query(reader, "statuses", {}))["dropped"] > 0
    assert json.loads(answer_viewer_query(reader, "pulse", {}))["ended"]
    evaluations = json.loads(answer_viewer_query(reader, "evaluations", {}))
    assert next(each["step"] for each in evaluations if each["policy"] == "solver") == 0
    assert all({"reward", "reward_error"} <= each["metrics"].keys() for each in evaluations)
    for question in QUESTIONS:
        asked = {"episode": "e1", "step": "5", "policy": "solver", "metric": "loss"}
        json.loads(answer_viewer_query(reader, question, asked))
    reader.close()


@pytest.mark.parametrize(
    ("question", "parameters", "says"),
    [
        ("nothing", {}, "unknown question"),
        ("conversation", {"episode": "../../etc"}, "no episode"),
        ("conversation", {"episode": "forks/../e1"}, "no episode"),
        ("conversation", {"episode": "e1", "attempt": "many"}, "attempt must be"),
        ("episodes", {"limit": "9" * 400}, "limit must be"),
        ("episodes", {"where": "nonsense"}, "--where"),
        ("step", {"step": "1000"}, "no such step"),
    ],
)
def test_a_wrong_question_is_refused_in_words(
    sample_run: Path, question: str, parameters: dict[str, str], says: str
) -> None:
    reader = RunReader(sample_run)
    with pytest.raises(InputError, match=re.escape(says)):
        answer_viewer_query(reader, question, parameters)
    reader.close()


def test_values_that_javascript_does_not_hold_are_told_as_text() -> None:
    value = {
        "large": 2**60,
        "small": 2**53 - 1,
        3: float("nan"),
        "half": "\ud800",
        "bytes": b"\x00\xff",
        "inf": [float("inf")],
    }
    assert json.loads(as_json(value)) == {
        "large": str(2**60),
        "small": 2**53 - 1,
        "3": None,
        "half": "\ud800",
        "bytes": "00ff",
        "inf": [None],
    }
