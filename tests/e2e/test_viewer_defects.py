"""Fourteen defects that a first user met in the viewer and in the terminal's plots, each by its number."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import pytest

from agentrl.cli.main import main
from agentrl.inspection.reader import RunReader
from agentrl.inspection.viewer.application import serve_viewer
from agentrl.journal.entries import JournalEntry, TurnEntry, encode_body
from agentrl.journal.port import EpisodeEnd, MetricRow, VersionPublication
from agentrl.journal.store import SqliteJournal
from tests.browser import Tab
from tests.journal_cases import (
    entries_with,
    header,
    spec,
    step_of,
    train_bargains,
    weights,
    write_bargains,
    write_offers,
)
from tests.support.compared_runs import write_compared_run
from tests.viewer_cases import READY, WORST, show, text

pytestmark = [pytest.mark.e2e, pytest.mark.needs("chromium")]

STEPS, CONTEXT, MESSAGES = 120, 300, 20
EVALUATED = (19, 20, 38, 40, 60, 80, 100, 120)
"""Evaluations of two policies at every 20th step of each: near-doubles at 19 and 38."""


@pytest.fixture(scope="module")
def long_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A run of many steps, whose one episode has a long context."""
    with pytest.MonkeyPatch.context():
        run = tmp_path_factory.mktemp("long") / "run"
        asyncio.run(write_long_run(run))
        out = run.parent / "long.html"
        assert main(["run", "export", str(run), "--to", "html", "--out", str(out)]) == 0
        yield out.as_uri()


async def write_long_run(directory: Path) -> None:
    from agentrl.core.records import PolicyVersion
    from agentrl.journal.entries import episode_digest

    journal = SqliteJournal(directory / "journal", info={"name": "long"})
    each = spec(0)
    [begin, turn, *others] = entries_with(0, "text")
    assert isinstance(turn, TurnEntry)
    messages = tuple({"role": "user", "content": f"example {number}"} for number in range(MESSAGES - 1))
    answer = {"role": "tool", "content": "42", "tool_call_id": "call_7", "name": "query"}
    large = msgspec.structs.replace(turn, context_ids=b"\1\0\0\0" * CONTEXT, messages=(*messages, answer))
    journal.admit(each)
    entries = [
        JournalEntry(each.episode_id, 0, f"r#{number}", b"", encode_body(body))
        for number, body in enumerate((begin, large, *others))
    ]
    for entry in entries:
        journal.turn_log("w0").append(entry)
    await journal.commit(EpisodeEnd(each, header(each, len(entries)), episode_digest(entries), {}))
    journal.record(VersionPublication(weights("policy", 0, 0), None))
    for step in range(1, STEPS + 1):
        journal.record(VersionPublication(weights("policy", 0, step), PolicyVersion("policy", 0, step - 1)))
        journal.record(step_of("policy", 0, step, []))
        measured = {"reward/mean": 0.36 + 0.24 * step / STEPS, "constant": 0.0, "mismatch/k3": 1e-7 * step, "mine": 3.0}
        journal.record(MetricRow("policy", step, measured))
    for step in EVALUATED:
        journal.record(MetricRow("policy", step, {"evaluation/reward": step / 200, "evaluation/reward_error": 0.05}))
    await journal.close()


def values(tab: Tab, selector: str) -> list[str]:
    found = tab.evaluate(f"[...document.querySelectorAll({json.dumps(selector)})].map(node => node.innerText.trim())")
    return [str(each) for each in found]


def chart(title: str) -> str:
    """JavaScript: the card with a title."""
    return f"[...document.querySelectorAll('.card')].find(card => card.querySelector('h2')?.innerText === {title!r})"


def labels(tab: Tab, title: str, axis: str = "labels") -> list[str]:
    found: Any = tab.evaluate(f"[...{chart(title)}.querySelectorAll('.{axis} span')].map(span => span.textContent)")
    return [str(each) for each in found]


def count(tab: Tab, title: str, selector: str) -> int:
    return int(tab.evaluate(f"{chart(title)}.querySelectorAll({selector!r}).length"))


def test_01_the_first_page_is_an_overview(tab: Tab, sample_file: str) -> None:
    show(tab, sample_file)
    assert tab.evaluate("document.querySelector('#main').dataset.view") == "overview"
    shown = values(tab, ".card h2")
    assert {"Reward of training", "Held-out reward", "Response length", "Entropy", "Throughput", "Busy"} <= {*shown}
    assert any(tile.endswith("held-out reward of solver at step 8") and "±" in tile for tile in values(tab, ".tile"))


def test_02_any_metric_is_found_by_search_also_an_environments_own(tab: Tab, sample_file: str) -> None:
    show(tab, sample_file)
    tab.press("/")
    assert tab.evaluate("document.activeElement.id") == "search"
    for key in "rounds":
        tab.press(key)
    tab.press("Enter")
    tab.wait("document.querySelector('.chosen')")
    assert count(tab, "rounds", "path.curve") == 1, "of the solver"
    tab.evaluate("document.querySelector('.remove').click()")
    tab.wait("!document.querySelector('.chosen')")


@pytest.mark.damages_journal
def test_02_several_runs_are_on_one_chart(tab: Tab, tmp_path: Path) -> None:
    for name, best in (("a", 0.4), ("b", 0.8)):
        write_compared_run(tmp_path / name, {"t0": best, "t1": best}, config={"steps": best}, curve=[0.1, 0.2, best])

    async def look() -> None:
        async with serve_viewer(tmp_path) as served:
            await asyncio.to_thread(compare, served.address)

    def compare(address: str) -> None:
        tab.open(address)
        tab.wait(READY)
        assert values(tab, "table.runs tbody a.id") == ["a", "b"]
        tab.evaluate("document.querySelectorAll('table.runs input').forEach(box => box.click())")
        tab.evaluate("document.querySelector('form.query button').click()")
        tab.wait(chart("Reward of training"))
        assert count(tab, "Reward of training", "path.curve") == 2
        assert re.search(r"\+0\.400 \[[+−]\d\.\d{3}, \+\d\.\d{3}\]", text(tab))
        assert "steps" in text(tab)
        tab.evaluate("location.hash = '#/runs?find=b'")
        tab.wait("document.querySelectorAll('table.runs tbody tr').length === 1")

    asyncio.run(look())


def test_a_run_of_two_policies_is_listed_with_the_reward_of_each(tab: Tab, sample_run: Path) -> None:
    reader = RunReader(sample_run)
    rewards = reader.line().rewards
    reader.close()
    assert len(rewards) == 2

    def look(address: str) -> None:
        tab.open(address)
        tab.wait(READY)
        told = " · ".join(f"{policy} {reward:.3f}".replace("-", "−") for policy, reward in rewards.items())
        assert values(tab, "table.runs tbody td[data-label=reward]") == [told], "not their mean"

    async def serve() -> None:
        async with serve_viewer(sample_run.parent) as served:
            await asyncio.to_thread(look, served.address)

    asyncio.run(serve())


@pytest.mark.damages_journal
def test_the_printed_address_works_again_in_an_open_page(tab: Tab, tmp_path: Path) -> None:
    write_compared_run(tmp_path / "a", {"t0": 1.0}, curve=[0.1])

    async def look() -> None:
        async with serve_viewer(tmp_path) as served:
            await asyncio.to_thread(paste, served.address)

    def paste(address: str) -> None:
        show(tab, address)
        tab.evaluate("location.hash = '#/overview?run=a'")
        tab.wait(chart("Held-out reward"))
        tab.evaluate(f"location.hash = {'#' + address.split('#')[1]!r}")
        tab.wait("document.querySelector('table.runs')")
        assert tab.evaluate("location.hash") == "#/runs"
        tab.open(address.split("#")[0] + "?again#/runs?token=17")  # a place in an episode, not the server's token
        tab.wait("document.querySelector('table.runs')")
        assert tab.errors == []

    asyncio.run(look())


@pytest.mark.damages_journal
def test_an_evaluation_opens_on_its_result_and_leads_to_its_failures(tab: Tab, tmp_path: Path) -> None:
    write_compared_run(tmp_path / "a", {"t0": 1.0, "t1": 0.0}, evaluated="runs/b/best")

    async def look() -> None:
        async with serve_viewer(tmp_path / "a") as served:
            await asyncio.to_thread(read, served.address)

    def read(address: str) -> None:
        show(tab, address)
        assert values(tab, ".tile")[0].split("\n") == ["0.500 ± 0.050", "reward"]
        tab.evaluate("document.querySelector('#main p a').click()")
        tab.wait("document.querySelector('table.episodes')")
        assert values(tab, "table.episodes tbody a.id") == ["e1"]

    asyncio.run(look())


def test_a_filter_among_the_words_to_look_for_is_applied_as_a_filter(tab: Tab, sample_file: str) -> None:
    show(tab, sample_file + "#/episodes")
    submit = "document.querySelector('#search').value = {!r}; document.querySelector('form.query button').click()"
    tab.evaluate(submit.format("reward < 0"))
    tab.wait("document.querySelector('#where')?.value === 'reward < 0'")
    assert tab.evaluate("document.querySelector('#search').value") == ""
    tab.evaluate(submit.format("episode e1 = 3"))
    tab.wait("document.querySelector('#search')?.value === 'episode e1 = 3'")
    assert tab.evaluate("document.querySelector('#where').value") == "reward < 0"


def test_03_scales_have_round_ticks_and_are_not_cropped(tab: Tab, long_file: str) -> None:
    show(tab, long_file)
    assert labels(tab, "Reward of training") == ["0", "0.25", "0.50", "0.75", "1.00"]
    assert labels(tab, "Reward of training", "ticks") == ["1", "50", "100"]
    ends = tab.evaluate(f"{chart('Reward of training')}.querySelector('path.curve').getAttribute('d')")
    heights = [float(part.split()[1]) for part in str(ends).lstrip("M").split("L")]
    assert heights[0] == pytest.approx(120 * (1 - 0.362), abs=0.1), "0.36 lies at 0.36 of the height"
    assert heights[-1] == pytest.approx(120 * (1 - 0.6), abs=0.1)


def test_04_held_out_curves_have_points_and_error_bars(tab: Tab, long_file: str) -> None:
    for address, title in (("", "Held-out reward"), ("#/evaluations", "Held-out reward of policy")):
        show(tab, long_file + address)
        assert count(tab, title, ".dot") == len(EVALUATED)
        assert count(tab, title, ".error") == len(EVALUATED)


def test_07_failed_episodes_look_failed(tab: Tab, sample_file: str, sample_run: Path) -> None:
    show(tab, sample_file + "#/episodes")
    reader = RunReader(sample_run)
    lines = reader.episodes(training_first=True, limit=100)
    reader.close()
    failed = sum(line.drop_reason is not None or (line.reward is not None and line.reward <= 0) for line in lines)
    assert failed > 0
    assert tab.evaluate("document.querySelectorAll('.strip .dot.bad').length") == failed
    assert values(tab, "tbody tr.failed .failure") == ["✕ failed"] * failed
    assert "100 episodes" in text(tab, ".strip")
    assert text(tab, ".strip h2").endswith(", oldest on the left"), "the list below begins with the newest"
    assert tab.evaluate("document.querySelectorAll('.strip .ticks span').length") > 1
    assert "evaluated" in text(tab, ".filters")


def test_several_rewarded_seats_are_shown_apart_and_never_added(tab: Tab, tmp_path: Path) -> None:
    asyncio.run(write_bargains(tmp_path / "shop"))
    out = tmp_path / "shop.html"
    assert main(["run", "export", str(tmp_path / "shop"), "--to", "html", "--out", str(out)]) == 0
    show(tab, out.as_uri())
    assert values(tab, ".card h2")[:3] == ["Reward of training", "Held-out reward", "agreed"], "own metrics come first"
    assert values(tab, ".card h2")[-1] == "Settings that differ from the defaults"
    legends = tab.evaluate("[...document.querySelectorAll('.card .legend')].map(each => each.innerText.split('\\n'))")
    assert legends[:3] == [["buyer", "seller"], ["buyer", "seller"], ["training", "held-out"]]
    tiles = values(tab, ".tile")
    assert {"0.75\nreward of buyer at step 3", "−0.75\nheld-out reward of seller at step 3"} <= {*tiles}
    assert not [tile for tile in tiles if tile.startswith("0\n")], "no sum over seats"
    settings = values(tab, ".card:last-child .facts div")
    assert "environment.id\nshop:Bargain" in settings
    assert "policies.trader.step_size\n2" in settings
    assert "policies.trader.max_staleness\n1" in settings
    assert not [each for each in settings if "drain" in each], "which are as by default"
    show(tab, out.as_uri() + "#/episodes?sort=reward/seller")
    assert [name for name in values(tab, "thead th") if name.startswith("reward")] == [
        "reward/buyer",
        "reward/seller ↓",
    ]
    assert values(tab, "tbody tr:nth-child(4) td.right")[:2] == ["0.250", "−0.250"]
    assert values(tab, "tbody .failure") == [], "no reward of one seat says that the episode failed"
    assert count_dots(tab) == 2 * 6
    assert values(tab, ".strip .legend li") == ["reward/buyer", "reward/seller"]
    show(tab, out.as_uri() + f"#/episodes?where={quote('reward/buyer > 0.6 or reward/seller = -0.25')}")
    assert values(tab, "tbody a.id") == ["e5", "e1"]
    show(tab, out.as_uri() + f"#/episodes?where={quote('reward > 0')}")
    assert "reward/buyer, reward/seller" in text(tab, ".problem")
    show(tab, out.as_uri() + "#/episode/e5/family")
    assert "buyer 0.75 · seller −0.75" in text(tab, ".facts")
    assert 't2 {"item": "lamp", "limit": 12}' in text(tab, ".facts")
    assert "mean reward of buyer 0.375, mean reward of seller −0.375" in text(tab, ".tree")
    assert values(tab, ".relative.self .amount") == ["0.750", "−0.750"]
    show(tab, out.as_uri() + "#/compare")
    assert values(tab, ".offers li")[:2] == [
        "e5 and e4 rewards of buyer 0.75 and 0",
        "e4 and e5 rewards of seller 0 and −0.75",
    ]
    show(tab, out.as_uri() + "#/compare?a=e5&b=e4")
    assert values(tab, ".heads h2") == ["e5 buyer 0.75 · seller −0.75", "e4 buyer 0 · seller 0"]
    assert tab.errors == []
    asyncio.run(train_bargains(tmp_path / "shop"))
    assert main(["run", "export", str(tmp_path / "shop"), "--to", "html", "--out", str(out), "--force"]) == 0
    show(tab, out.as_uri() + "#/steps")
    assert values(tab, ".card:first-child .legend li") == ["buyer", "seller"]
    assert text(tab, "tbody tr td[data-label=reward]").split() == ["buyer", "0.375", "seller", "−0.375"]


def test_a_prompt_s_tools_and_the_settings_of_a_seat_are_shown(tab: Tab, sample_file: str, tmp_path: Path) -> None:
    asyncio.run(write_offers(tmp_path / "offers"))
    out = tmp_path / "offers.html"
    assert main(["run", "export", str(tmp_path / "offers"), "--to", "html", "--out", str(out)]) == 0
    show(tab, out.as_uri() + "#/episode/e0")
    assert "add(a: integer) Add." in text(tab, ".beside-messages .content")
    assert tab.evaluate("document.querySelectorAll('.beside-messages').length") == 1, "of the first turn alone"
    assert "tokenized differently" in tab.evaluate("document.querySelector('.chip.warn').title")
    assert "temperature 1, at most 64 tokens a turn, 8 turns, context 512" in text(tab, ".facts")
    show(tab, sample_file + "#/episode/e1")
    assert 'train-3 {"terms": 2}' in text(tab, ".facts")
    assert "temperature 1, at most 96 tokens a turn, 8 turns, context 1,024" in text(tab, ".facts")


def count_dots(tab: Tab) -> int:
    return int(tab.evaluate("document.querySelectorAll('.strip .dot').length"))


def test_08_numbers_of_a_group_are_in_one_column(tab: Tab, sample_file: str) -> None:
    show(tab, f"{sample_file}#/episode/{quote(WORST)}/family")
    edges = tab.evaluate(
        "[...document.querySelectorAll('.tree .tree .amount, .tree ul ul .amount')].map(node => {"
        " const box = node.getBoundingClientRect();"
        " return [node.closest('ul').dataset.place ?? '', box.left, box.right, node.scrollWidth - node.clientWidth]; })"
    )
    assert len(edges) >= 4
    assert len({round(right, 1) for _, _, right, _ in edges}) == 1, "also in the row of the episode itself"
    assert all(overhang <= 0 for *_, overhang in edges), "also where a number is negative"


def test_09_long_context_is_folded_and_the_first_sampled_token_is_seen(tab: Tab, long_file: str) -> None:
    show(tab, long_file + "#/episode/e0/tokens")
    assert text(tab, ".fold") == f"{CONTEXT - 20} tokens of context"
    top, bottom = tab.evaluate(
        "(box => [box.top, box.bottom])(document.querySelector('.token.sampled').getBoundingClientRect())"
    )
    assert 0 < top < bottom < 900
    tab.evaluate("document.querySelector('.fold').click()")
    assert tab.evaluate("document.querySelectorAll('.token.context').length") == CONTEXT
    show(tab, long_file + "#/episode/e0")
    assert text(tab, ".context summary") == f"{MESSAGES - 2} earlier messages of context"
    assert "example 3" not in text(tab)
    tab.evaluate("document.querySelector('.context').open = true")
    tab.wait("document.querySelector('#main').innerText.includes('example 3')")


def test_10_steps_come_newest_first_in_pages_with_aligned_numbers(tab: Tab, long_file: str) -> None:
    show(tab, long_file + "#/steps")
    assert values(tab, "tbody a.id")[:2] == [f"policy@0.{STEPS}", f"policy@0.{STEPS - 1}"]
    assert tab.evaluate("document.querySelectorAll('tbody tr').length") == 50
    aligned = tab.evaluate("getComputedStyle(document.querySelector('td[data-label=loss]')).textAlign")
    assert aligned == "right"
    assert len({len(value) for value in values(tab, "td[data-label='loss']")}) == 1
    tab.evaluate("document.querySelector('.more').click()")
    assert tab.evaluate("document.querySelectorAll('tbody tr').length") == 100


def test_11_metrics_of_a_step_are_grouped_with_units_and_meanings(tab: Tab, sample_file: str) -> None:
    show(tab, sample_file + "#/step/solver/1/5")
    assert values(tab, ".groups h2") != []
    assert "mean entropy" in text(tab, ".groups")
    assert "nats" in text(tab, ".measured dd")


def test_12_an_evaluation_just_after_another_makes_no_kink(tab: Tab, long_file: str) -> None:
    show(tab, long_file)
    path = tab.evaluate(f"{chart('Held-out reward')}.querySelector('path.curve').getAttribute('d')")
    assert str(path).count("L") + 1 == len(EVALUATED) - 2, "19 and 38 are points beside the line"


def test_13_tool_results_are_plain_and_compare_offers_pairs(tab: Tab, long_file: str, sample_file: str) -> None:
    show(tab, long_file + "#/episode/e0")
    assert "42" in text(tab, ".turn")
    assert "tool_call_id" not in text(tab)
    show(tab, sample_file + "#/compare")
    assert len(values(tab, ".offers a")) > 3
    tab.evaluate("document.querySelector('.offers a').click()")
    tab.wait("document.querySelector('.verdict')")


def test_14_ticks_in_the_terminal_are_round_and_differ(long_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = Path(long_file.removeprefix("file://")).parent / "run"
    for metric, ticks in (
        ("constant", ["1.00", "0.50", "0.00"]),
        ("mismatch/k3", ["2.00e-05", "1.00e-05", "0"]),
        ("reward/mean", ["0.600", "0.400", "0.200"]),
    ):
        assert main(["run", "curve", str(run), "--metric", metric]) == 0
        printed = capsys.readouterr().out.splitlines()
        assert [line.split("┤")[0].strip() for line in printed if "┤" in line] == ticks, metric
