"""The viewer in a real browser: every view from its address, the keyboard, phones, and content that would be more."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import msgspec
import pytest

from agentrl.cli.main import main
from agentrl.core.records import PolicyVersion, VersionSpan
from agentrl.core.text import escape_text
from agentrl.core.tokens import EncodedTokens
from agentrl.inspection.comparisons import compare_episodes_across_runs
from agentrl.inspection.reader import RunReader
from agentrl.inspection.viewer import page
from agentrl.journal.entries import JournalEntry, TurnEntry, encode_body
from agentrl.journal.port import EpisodeEnd
from agentrl.journal.store import SqliteJournal
from tests.browser import Tab, find_chromium
from tests.journal_cases import entries_with, header, spec, write, write_run
from tests.viewer_cases import (
    FOREIGN,
    HOSTILE,
    READY,
    VIEWS,
    faint_texts,
    foreign_elements,
    hostile_views,
    lost_keys,
    show,
    text,
)

CHROMIUM = find_chromium()
pytestmark = [pytest.mark.e2e, pytest.mark.needs("chromium")]


# --- views ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_opens_from_its_address_on_a_screen_and_a_phone(tab: Tab, sample_file: str, view: str) -> None:
    """Its texts have contrast in both themes, and the tab key leads on."""
    for width, height, theme in ((1280, 900, "light"), (360, 740, "dark")):
        tab.size(width, height, theme=theme)
        show(tab, sample_file + VIEWS[view])
        assert faint_texts(tab) == []
        assert lost_keys(tab) == []
        assert len(text(tab)) > 40
        assert not tab.evaluate("document.querySelector('.problem')?.innerText")
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.evaluate("document.querySelectorAll('#top nav [aria-current]').length") == 1
    assert tab.errors == []
    assert [address for address in tab.requests if not address.startswith(("file:", "about:"))] == []


def test_a_token_s_address_shows_all_that_is_known_of_it(tab: Tab, sample_file: str) -> None:
    show(tab, sample_file + VIEWS["tokens"])
    assert tab.evaluate("document.querySelector('.token.chosen').dataset.at") == "40"
    tab.press("ArrowRight")
    assert tab.evaluate("document.querySelector('.token.chosen').dataset.at") == "41", "the keys are at the tokens"
    first = text(tab, ".inspector")
    for name in ("id", "loss mask", "place"):
        assert name in first
    tab.evaluate("document.querySelector('.token.sampled').click()")
    chosen = text(tab, ".inspector")
    for name in ("log-probability", "the trainer’s", "ratio", "advantage", "version", "staleness"):
        assert name in chosen
    assert "token=" in tab.evaluate("location.hash")
    tab.evaluate("document.querySelector('.tokens').focus()")
    before = int(tab.evaluate("document.querySelector('.token.chosen').dataset.at"))
    tab.press("ArrowRight")
    assert int(tab.evaluate("document.querySelector('.token.chosen').dataset.at")) == before + 1


def test_tokens_are_painted_by_what_is_asked(tab: Tab, sample_file: str) -> None:
    show(tab, sample_file + VIEWS["tokens"])
    for label, painted in (
        ("version", "hue"),
        ("log-probability", "heat"),
        ("advantage", "lowered"),
        ("loss mask", "marked"),
    ):
        tab.evaluate(f"[...document.querySelectorAll('.segments button')].find(b => b.innerText === '{label}').click()")
        assert tab.evaluate(f"document.querySelectorAll('.tokens .sampled[class*={painted}]').length") > 10, label
    assert "routing" not in text(tab, ".segments"), "it was not recorded"


def test_a_conversation_s_replies_are_painted_tokens(tab: Tab, sample_file: str) -> None:
    show(tab, sample_file + VIEWS["conversation"])
    tab.wait("document.querySelector('.reply .token')")
    assert tab.evaluate("document.querySelector('.act.selected').dataset.call") == "r#2"
    assert "I think it is 63" in text(tab)


# --- the keyboard -----------------------------------------------------------------------------------------------------


def test_the_keyboard_leads_from_the_list_to_a_token_and_back(tab: Tab, sample_file: str) -> None:
    show(tab, sample_file + VIEWS["list"])
    for key in "jjk":
        tab.press(key)
    name = tab.evaluate("document.querySelector('tr.selected .id').innerText")
    tab.press("Enter")
    tab.wait(READY.replace("data-view", "data-view=episode"))
    assert text(tab, "h1").startswith(str(name))
    tab.press("2")
    tab.wait("location.hash.includes('/tokens')")
    tab.wait("document.querySelector('.tokenview')")
    tab.press("Escape")
    tab.wait("document.querySelector('.beside')")
    tab.press("]")
    tab.wait(f"document.querySelector('h1').innerText.trim() !== {json.dumps(name)}")
    tab.press("Escape")
    tab.wait(READY.replace("data-view", "data-view=episodes"))
    assert "reward" in tab.evaluate("decodeURIComponent(location.hash)"), "the list as it was"
    tab.press("/")
    assert tab.evaluate("document.activeElement.id") == "search"
    tab.press("Escape")
    tab.press("?")
    assert tab.evaluate("document.getElementById('help').open")
    tab.press("Escape")
    tab.wait("!document.getElementById('help').open")
    tab.press("g")
    tab.press("s")
    tab.wait("location.hash === '#/steps'")
    tab.press("d")
    assert tab.evaluate("document.documentElement.dataset.theme") == "dark"
    assert tab.errors == []


# --- the same answers as the query layer ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "where",
    [
        "reward < 0 or turns > 5 and not status = trained",
        'drop_reason != null and (seats ~ solver or environment ~ "Propose")',
        "not (staleness > 0) and policies = 'checker,solver'",
        "parent = null and reward >= -.5e0 and stop_reason <> max_turns",
    ],
)
def test_a_file_filters_and_sorts_as_the_query_layer(tab: Tab, sample_file: str, sample_run: Path, where: str) -> None:
    reader = RunReader(sample_run)
    for sort, descending in (("reward", False), ("tokens", True), ("drop_reason", True), ("episode", False)):
        expected = reader.episodes(where, sort=sort, descending=descending, limit=100)
        order = "" if descending else "&ascending=1"
        show(tab, f"{sample_file}#/episodes?where={quote(where)}&sort={sort}{order}")
        shown = tab.evaluate("[...document.querySelectorAll('tbody a.id')].map(a => a.innerText)")
        assert shown == [line.episode for line in expected]
        assert text(tab, ".count").startswith(f"{reader.count(where)} episode")
    reader.close()


@pytest.mark.parametrize("address", ["#/nothing", "#/episode/e999999", "#/step/nobody/0/1", "#/%ff/%00"])
def test_an_address_that_names_nothing_leads_back_to_the_episodes(tab: Tab, sample_file: str, address: str) -> None:
    show(tab, sample_file + address)
    assert text(tab, ".problem")
    assert text(tab, "#top nav")
    tab.evaluate("document.querySelector('#main a[href=\"#/episodes\"]').click()")
    tab.wait("document.querySelector('#main tr[data-to]')")


def test_what_was_trained_is_listed_before_what_was_evaluated(tab: Tab, sample_file: str, sample_run: Path) -> None:
    reader = RunReader(sample_run)
    purposes = {line.episode: line.purpose for line in reader.episodes(limit=10_000)}
    reader.close()
    assert len(set(purposes.values())) > 1
    show(tab, sample_file + "#/episodes")
    listed = tab.evaluate("[...document.querySelectorAll('#main tr[data-to] .of-episode')].map(cell => cell.innerText)")
    assert [purposes[one.split()[0]] for one in listed[:20]] == ["train"] * 20


def test_a_turn_that_calls_a_tool_shows_the_call_and_the_tokens_on_demand(
    tab: Tab, sample_file: str, sample_run: Path
) -> None:
    reader = RunReader(sample_run)
    wanted = [line.episode for line in reader.episodes("environment ~ Calc or tokens > 20", limit=1_000)]
    called = next(
        (episode, entry)
        for episode in wanted
        for _, entry in reader.episode(episode).entries
        if isinstance(entry, TurnEntry) and "<tool_call>" in entry.text and "</tool_call>" in entry.text
    )
    reader.close()
    show(tab, f"{sample_file}#/episode/{called[0]}")
    name = json.loads(called[1].text.split("<tool_call>")[1].split("</tool_call>")[0])["name"]
    assert name in text(tab, ".calls")
    assert "<tool_call>" not in text(tab, ".calling")
    tab.evaluate("document.querySelector('details.sampled').open = true")
    assert "tool_call" in text(tab, "details.sampled .token, details.sampled")


def test_a_wrong_filter_says_what_is_wrong(tab: Tab, sample_file: str) -> None:
    for where in ("rewrd < 0", "reward <", "(reward < 0", "reward < x", "reward ! 0"):
        show(tab, f"{sample_file}#/episodes?where={quote(where)}")
        assert len(text(tab, ".problem")) > 10, where
    assert tab.errors == []


def test_two_episodes_part_where_the_query_layer_says(tab: Tab, sample_file: str, sample_run: Path) -> None:
    reader = RunReader(sample_run)
    names = [line.episode for line in reader.episodes("environment ~ Solve and purpose = train", limit=12)]
    for a, b in zip(names, [*names[4:], *names[:4]], strict=True):
        found = compare_episodes_across_runs(reader, a, reader, b).departure
        show(tab, f"{sample_file}#/compare?a={quote(a)}&b={quote(b)}")
        if found is None or found.kind == "environment":
            assert "the same" in text(tab, ".verdict")
            continue
        assert f"They part at {found.call}," in text(tab, ".verdict")
        assert ("token" in text(tab, ".verdict")) == (found.token is not None)
        if found.token is not None:
            assert f"from token {found.token} on" in text(tab, ".verdict")
    reader.close()


# --- served -----------------------------------------------------------------------------------------------------------


@contextmanager
def serve(run: Path) -> Iterator[str]:
    """The address that the command prints."""
    command = [sys.executable, "-m", "agentrl.cli", "run", "serve", str(run), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["address"]
        finally:
            process.terminate()


def open_episodes(tab: Tab, address: str) -> None:
    """The list of episodes of a served run."""
    tab.open(address.replace("#", "#/episodes&"))
    tab.wait(READY)


def test_a_served_run_shows_every_view_and_keeps_its_token_out_of_the_address(tab: Tab, sample_run: Path) -> None:
    with serve(sample_run) as address:
        tab.open(address)
        tab.wait(READY)
        assert "token" not in tab.evaluate("location.href")
        tab.wait("document.getElementById('live').innerText === 'finished'")
        for name, view in VIEWS.items():
            tab.evaluate(f"document.querySelector('#main').removeAttribute('data-view'), location.hash = {view!r}")
            tab.wait(READY)
            assert not tab.evaluate("document.querySelector('.problem')?.innerText"), name
        tab.call("Page.reload")
        tab.wait(READY)
        assert not tab.evaluate("document.querySelector('.problem')?.innerText"), "it is known again"
        assert tab.errors == []
        origin = address.partition("/#")[0]
        assert {
            request.partition("/ask/")[0].rstrip("/").partition("#")[0].rstrip("/") for request in tab.requests
        } == {origin}


def test_a_step_without_a_gradient_is_marked_in_the_list_and_on_its_page(
    tab: Tab, sample_run: Path, tmp_path: Path
) -> None:
    shutil.copytree(sample_run, tmp_path / "run")
    connection = sqlite3.connect(tmp_path / "run" / "journal" / "control.db")
    statement = "INSERT INTO metrics (policy, step, name, value, recorded_at) VALUES ('solver', 8, ?, 1, 1e12)"
    connection.executemany(statement, [("zero_gradient",), ("advantage/zero_share",)])
    connection.commit()
    connection.close()
    out = tmp_path / "equal.html"
    assert main(["run", "export", str(tmp_path / "run"), "--to", "html", "--out", str(out)]) == 0
    for view in ("#/steps", "#/step/solver/1/8"):
        show(tab, out.as_uri() + view)
        assert text(tab).count("no gradient: all groups were equal") == 1, view
    assert tab.errors == []


def test_a_page_without_the_token_says_what_to_do(tab: Tab, sample_run: Path) -> None:
    with serve(sample_run) as address:
        tab.open(address.partition("#")[0])
        tab.wait(READY)
        assert "agentrl run serve" in text(tab, ".problem")


def test_a_served_run_shows_what_is_written_meanwhile(tab: Tab, tmp_path: Path) -> None:
    async def go_on() -> None:
        journal = SqliteJournal(tmp_path / "run" / "journal")
        await write(journal, [spec(700)])
        await journal.close()

    asyncio.run(write_run(tmp_path / "run"))
    with serve(tmp_path / "run") as address:
        open_episodes(tab, address)
        tab.wait("document.getElementById('live').innerText")
        assert "e700" not in text(tab)
        asyncio.run(go_on())
        tab.wait("document.querySelector('#main').innerText.includes('e700')")
        assert tab.errors == []


def test_a_refresh_waits_for_who_reads_and_then_comes(tab: Tab, tmp_path: Path) -> None:
    async def go_on(number: int) -> None:
        journal = SqliteJournal(tmp_path / "run" / "journal")
        await write(journal, [spec(number)])
        await journal.close()

    asyncio.run(write_run(tmp_path / "run"))
    with serve(tmp_path / "run") as address:
        open_episodes(tab, address)
        pulses = "performance.getEntriesByType('resource').filter(each => each.name.includes('pulse')).length"
        holds = [
            (
                "document.querySelector('#main details').open = true",
                "document.querySelector('#main details').open = false",
            ),
            ("document.querySelector('#main a').focus({ preventScroll: true })", "document.activeElement.blur()"),
            ("getSelection().selectAllChildren(document.querySelector('#main'))", "getSelection().empty()"),
        ]
        for number, (hold, when_unlocked) in enumerate(holds, start=700):
            tab.wait(f"{pulses} > 0")
            tab.evaluate(hold)
            asyncio.run(go_on(number))
            seen = tab.evaluate(pulses)
            tab.wait(f"{pulses} > {seen} + 1")
            assert f"e{number}" not in text(tab), hold
            tab.evaluate(when_unlocked)
            tab.wait(f"document.querySelector('#main').innerText.includes('e{number}')")
        assert tab.errors == []


# --- hostile content --------------------------------------------------------------------------------------------------


def test_content_in_every_field_makes_no_element_and_runs_nothing(tab: Tab, tmp_path: Path) -> None:
    asyncio.run(write_run(tmp_path / "run", text=HOSTILE, name=HOSTILE))
    out = tmp_path / "hostile.html"
    assert main(["run", "export", str(tmp_path / "run"), "--to", "html", "--out", str(out)]) == 0
    for view in hostile_views():
        show(tab, out.as_uri() + view)
        assert foreign_elements(tab) == 0, view
        assert not tab.evaluate("window.hit"), view
        assert not set(tab.evaluate("document.body.innerText")) & set("\x1b\x07\x9b\u202e\u2066\u200b\ufeff\u2028"), (
            view
        )
    assert tab.errors == []
    show(tab, out.as_uri() + "#/episode/e1")
    assert FOREIGN in text(tab), "it is shown, as text"
    assert "\\u202e" in text(tab)


def test_the_page_escapes_the_characters_that_a_terminal_does_not_get(tab: Tab) -> None:
    source = (Path(page.__file__).parent / "text.js").read_text(encoding="utf-8").replace("export ", "")
    escaped = tab.evaluate(
        f"(() => {{ {source}; const found = [];"
        " for (let code = 0; code < 0x110000; code += 1)"
        " if (pieces(String.fromCodePoint(code))[0][1]) found.push([code, pieces(String.fromCodePoint(code))[0][0]]);"
        " return found; })()"
    )
    assert [tuple(found) for found in escaped] == [
        (code, escape_text(chr(code))) for code in range(0x110000) if escape_text(chr(code)) != chr(code)
    ]


@pytest.mark.damages_journal
def test_what_is_damaged_is_named_and_the_rest_is_shown(tab: Tab, sample_run: Path, tmp_path: Path) -> None:
    shutil.copytree(sample_run, tmp_path / "run")
    for database, statement in (
        ("turns-0.db", "UPDATE entries SET body = x'00' WHERE episode = 'e1' AND call = 'r#1'"),
        ("control.db", "UPDATE episodes SET reward = 55 WHERE episode = 'e2'"),
        ("control.db", "UPDATE steps SET loss = 99 WHERE step = 2"),
        ("control.db", "UPDATE step_units SET advantage = 77 WHERE step = 3"),
    ):
        connection = sqlite3.connect(tmp_path / "run" / "journal" / database)
        connection.execute(statement)
        connection.commit()
        connection.close()
    out = tmp_path / "damaged.html"
    assert main(["run", "export", str(tmp_path / "run"), "--to", "html", "--out", str(out)]) == 0
    for view in (
        "#/episodes?where=reward > 50",
        "#/episode/e1",
        "#/episode/e1/tokens",
        "#/episode/e1/why",
        "#/step/solver/0/3",
    ):
        show(tab, out.as_uri() + view)
        assert "not match" in text(tab) or "damaged" in text(tab) or "cannot be read" in text(tab), view
    show(tab, out.as_uri() + "#/episode/e0")
    assert not tab.evaluate("document.querySelector('.problem')?.innerText")
    assert tab.errors == []


def test_very_long_content_in_every_field_is_shown_in_parts(tab: Tab, tmp_path: Path) -> None:
    long = "wall of text \u202e<b> \n" * 8_000
    asyncio.run(write_run(tmp_path / "run", text=long))
    out = tmp_path / "long.html"
    assert main(["run", "export", str(tmp_path / "run"), "--to", "html", "--out", str(out)]) == 0
    for view in (
        "#/episodes",
        "#/episode/e1",
        "#/episode/e5",
        "#/episode/e1/tokens",
        "#/episode/e5/why",
        "#/compare?a=e1&b=e2",
    ):
        show(tab, out.as_uri() + view)
        assert (
            tab.evaluate("document.body.textContent.length - document.querySelector('script').textContent.length") > 100
        )
        assert tab.evaluate("document.querySelector('#main').textContent.length") < 500_000, view
    show(tab, out.as_uri() + "#/episode/e1")
    shown = "document.querySelector('.reply .content, .reply').textContent.length"
    before = tab.evaluate(shown)
    tab.evaluate("[...document.querySelectorAll('.turn .more')].filter(each => !each.hidden).at(-1).click()")
    assert tab.evaluate(shown) > 5 * before
    assert tab.errors == []


def test_a_long_row_of_tokens_is_shown_in_windows(tab: Tab, tmp_path: Path) -> None:
    write_large_row(tmp_path / "run", 20_000)
    with serve(tmp_path / "run") as address:
        tab.open(address + "&")
        tab.wait(READY)
        tab.evaluate("location.hash = '#/episode/e0/tokens?seat=solver&index=0&row=0&token=15000'")
        tab.wait("document.querySelector('.token.chosen')?.dataset.at === '15000'")
        assert tab.evaluate("document.querySelectorAll('.token').length") == 3_000
        tab.evaluate("[...document.querySelectorAll('.more')].find(each => each.innerText === 'more tokens').click()")
        assert tab.evaluate("document.querySelectorAll('.token').length") == 5_002
        assert tab.errors == []


def write_large_row(run: Path, count: int) -> None:
    """One episode of one turn of so many tokens."""

    async def make() -> None:
        journal = SqliteJournal(run / "journal", info={"name": "large"})
        log, each = journal.turn_log("w0"), spec(0)
        journal.admit(each)
        [begin, turn, *_] = entries_with(0, "text")
        assert isinstance(turn, TurnEntry)
        ids, version = b"\1\0\0\0" * count, PolicyVersion("policy", 0, 0)
        large = msgspec.structs.replace(
            turn, tokens=EncodedTokens(ids, (VersionSpan(0, count, version),), {"logprobs": b"\0" * 4 * count})
        )
        for number, body in enumerate((begin, large)):
            log.append(JournalEntry(each.episode_id, 0, f"r#{number}", b"", encode_body(body)))
        await journal.commit(EpisodeEnd(each, header(each, 2)))
        await journal.close()

    asyncio.run(make())
