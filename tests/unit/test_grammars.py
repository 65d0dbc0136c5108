"""Grammars of replies: what is refused, what may be asked again, and how much of their sets is recorded."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.core.errors import GrammarNotCheckedError, GrammarRefusedError
from agentrl.core.limited_process import LimitedProcess
from agentrl.core.tokens import KeptCount

xgrammar = pytest.importorskip("xgrammar", reason="vLLM is not installed")

from agentrl.engines.vllm import grammar_check, grammars  # noqa: E402
from agentrl.engines.vllm.grammars import Grammars, ReplyGrammar, enforces_grammars  # noqa: E402

END = 97
VOCABULARY = [*map(chr, range(32, 127)), "ab", "cd", "<end>"]
TEMPLATES = "agentrl.rollout.chat.template_process"
ENDLESS = {
    "asks": "text",
    "template": "endless",
    "source": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "values": {},
}


def tag(schema: Any) -> str:
    return json.dumps({"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}})


def token_info(*_: Any) -> Any:
    return xgrammar.TokenizerInfo(VOCABULARY, vocab_size=len(VOCABULARY), stop_token_ids=[END])


def ids(text: str) -> list[int]:
    return [VOCABULARY.index(character) for character in text]


class Checks:
    """A check that gives the next of its answers, the last one again and again."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.count = list(answers), 0

    def ask(self, *_: Any) -> Any:
        self.count += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def checked_by(monkeypatch: pytest.MonkeyPatch, *answers: Any) -> tuple[Grammars, Checks]:
    monkeypatch.setattr(grammars, "tokenizer_info", token_info)
    made, checks = Grammars("model", len(VOCABULARY)), Checks(*answers)
    monkeypatch.setattr(made, "_checks", checks)
    return made, checks


# --- the check --------------------------------------------------------------------------------------------------------


def test_a_grammar_with_slow_masks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = tag({"type": "object", "properties": {"a": {"type": "string"}}})
    assert grammar_check.refusal(schema, token_info()) == ""
    times = iter([0.01] * 20 + [0.06])
    monkeypatch.setattr(grammar_check, "mask_times", lambda *_: times)
    assert "more than 0.05 s of CPU time at one place" in grammar_check.refusal(schema, token_info())


def test_masks_are_measured_along_replies_of_several_kinds() -> None:
    compiler = xgrammar.GrammarCompiler(token_info(), cache_enabled=False)
    endless = compiler.compile_structural_tag(tag({"type": "string", "pattern": "^[a-d]{300}$"}))
    short = compiler.compile_structural_tag(tag({"enum": ["a"]}))
    assert len(list(grammar_check.mask_times(endless, token_info()))) == 4 * 64
    # three characters and the end
    assert len(list(grammar_check.mask_times(short, token_info()))) == 4 * 4


# --- the engine's side ------------------------------------------------------------------------------------------------


def test_a_refusal_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    made, checks = checked_by(monkeypatch, ("error", "[10:00:00] /a.cc:1: it is bad"))
    for _ in range(2):
        with pytest.raises(GrammarRefusedError, match="does not compile: it is bad"):
            asyncio.run(made.compile(tag({})))
    assert checks.count == 1


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (("ended", "the process that computes it ended (-9)"), "ended"),
        (("late", "the process did not answer"), "answer"),
        (OSError("no process can be started for it (no memory); free memory"), "free memory"),
    ],
)
def test_a_check_that_failed_is_made_again(monkeypatch: pytest.MonkeyPatch, failure: Any, reason: str) -> None:
    made, checks = checked_by(monkeypatch, failure, ("done", None))
    with pytest.raises(GrammarNotCheckedError, match=reason):
        asyncio.run(made.compile(tag({})))
    assert isinstance(asyncio.run(made.compile(tag({}))), ReplyGrammar)
    assert checks.count == 2


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"items": value}
    return value


def test_a_large_grammar_is_refused_without_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    made, checks = checked_by(monkeypatch, ("done", None))
    deep = '{"a":' * 5000 + "1" + "}" * 5000
    for grammar in (tag(nested(80)), deep, tag({"enum": list(range(30_000))})):
        with pytest.raises(GrammarRefusedError, match=r"too large|too deeply"):
            asyncio.run(made.compile(grammar))
    assert checks.count == 0
    asyncio.run(made.compile(tag(nested(64))))
    assert checks.count == 1


def test_compiled_grammars_are_bounded_by_number_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made, checks = checked_by(monkeypatch, ("done", None))

    async def compile_all() -> None:
        for number in range(80):
            await made.compile(tag({"const": number}))

    asyncio.run(compile_all())
    assert len(made._compiled) == 64
    assert made._compiler.get_cache_size_bytes() == 0  # type: ignore[union-attr]
    monkeypatch.setattr(grammars, "_MAX_CACHED_BYTES", 0)
    asyncio.run(made.compile(tag({"const": 79})))
    assert list(made._compiled) == [tag({"const": 79})]
    assert checks.count == 80


def config(backend: str, *, has_tokenizer: bool = True) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(skip_tokenizer_init=not has_tokenizer),
        parallel_config=SimpleNamespace(distributed_executor_backend=backend),
    )


def test_only_an_engine_that_continues_grammars_enforces_them() -> None:
    assert enforces_grammars(config("uni"))
    assert not enforces_grammars(config("mp"))
    assert not enforces_grammars(config("uni", has_tokenizer=False))


# --- kept sets --------------------------------------------------------------------------------------------------------


@pytest.fixture
def words() -> ReplyGrammar:
    compiler = xgrammar.GrammarCompiler(token_info(), cache_enabled=False)
    return ReplyGrammar(compiler.compile_structural_tag(tag({"type": "string", "pattern": "^[a-d]*$"})), 98)


def test_sets_are_those_of_the_grammar(words: ReplyGrammar) -> None:
    kept = words.kept_sets([*ids('"ab"'), END], 0, [END])
    letters = sorted([*ids('abcd"'), 95, 96])
    assert kept.counts.tolist() == [1, 7, 7, 7, 1]
    assert kept.ids.tolist() == [*ids('"'), *letters * 3, END]
    assert words.kept_sets([*ids('"ab"'), END], 3, [END]).counts.tolist() == [7, 1]


def test_the_sets_of_a_reply_are_bounded(words: ReplyGrammar, monkeypatch: pytest.MonkeyPatch) -> None:
    reply = ids('"' + "a" * 100)
    monkeypatch.setattr(grammars, "MAX_KEPT_IDS", 70)
    kept = words.kept_sets(reply, 0, [END])
    assert kept.counts.tolist() == [1] + [7] * 10 + [KeptCount.MISSING] * 90
    monkeypatch.setattr(grammars, "MAX_SETS_CPU_S", -1.0)
    assert words.kept_sets(reply, 1, [END]).counts.tolist() == [KeptCount.MISSING] * 100


# --- the process ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "kind"), [(signal.SIGSEGV, "failed"), (signal.SIGKILL, "ended")])
def test_a_request_that_crashes_the_process_differs_from_a_killed_process(number: int, kind: str) -> None:
    checks = LimitedProcess(TEMPLATES, cpu_s=60)
    thread, answers = asked(checks, ENDLESS)
    os.kill(process_of(checks).pid, number)
    thread.join()
    assert answers[0][0] == kind
    checks.close()


def test_a_late_answer_is_not_awaited() -> None:
    checks = LimitedProcess(TEMPLATES, cpu_s=60, wall_s=0.5)
    assert checks.ask(ENDLESS, ENDLESS) == ("late", "the process that computes it did not answer within 0.5 s")
    assert checks._process is None
    checks.close()


def test_a_process_that_is_closed_during_a_request_stays_closed() -> None:
    checks = LimitedProcess(TEMPLATES, cpu_s=60)
    thread, answers = asked(checks, ENDLESS, ENDLESS)
    process_of(checks)
    checks.close()
    thread.join()
    assert answers == [("ended", "the process that computes it is closed")]
    assert checks._process is None
    assert checks.ask(ENDLESS)[0] == "ended"


def asked(checks: LimitedProcess, *requests: Any) -> tuple[threading.Thread, list[Any]]:
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(checks.ask(*requests)))
    thread.start()
    return thread, answers


def process_of(checks: LimitedProcess) -> Any:
    while checks._process is None:
        time.sleep(0.01)
    return checks._process
