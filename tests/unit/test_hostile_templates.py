"""Chat templates and their files: code that reaches outside, raises or never ends its text is refused by name."""

from __future__ import annotations

import json
import os
import resource
import signal
from pathlib import Path

import pytest

from agentrl.core.errors import ModelError
from agentrl.core.limited_process import MAX_MEMORY_BYTES
from agentrl.rollout.chat.chat_template import AddedToken, ChatTemplate, ControlTokens
from agentrl.rollout.chat.template_process import TemplateError, TemplateProcess
from tests.unit.test_chat_format import QWEN_SPECIAL, write_model


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "cannot render"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "cannot render"),
        ("{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}", "cannot render"),
        ("{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}", "characters"),
        ("{{ '%40000000d'|format(messages|length) }}", "characters"),
        ("{{ " + "(" * 20_000 + ")" * 20_000 + " }}", "does not compile"),
        ("{% for m in messages %}" * 30 + "{% endfor %}" * 30, "does not compile"),
    ],
)
def test_a_faulty_template_is_refused(tmp_path: Path, template: str, complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        ChatTemplate(write_model(tmp_path, template, QWEN_SPECIAL)).render(
            [{"role": "user", "content": "x"}], [], prompt=True
        )


@pytest.mark.parametrize(
    "template",
    [
        "{{ '%1000000000d'|format(1) }}",
        "{{ 'a' * 3 * 10 ** 9 }}",
        "{{ 'a'|center(10 ** 10) }}",
        "{{ messages|tojson(indent=10 ** 10) }}",
        "{% set ns = namespace(a='a' * 999) %}{% for i in range(99) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
        "{{ 'a' * (messages|length) * 3 * 10 ** 9 }}",
    ],
)
def test_the_memory_of_a_template_is_bounded(tmp_path: Path, template: str) -> None:
    """Of its compilation, too, which computes constants. Other templates are rendered afterwards."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ModelError, match=r"needs more than 1,024 MiB|characters"):
        ChatTemplate(write_model(tmp_path, template, QWEN_SPECIAL)).render(
            [{"role": "user", "content": "x"}], [], prompt=True
        )
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MAX_MEMORY_BYTES // 1024
    (tmp_path / "other").mkdir()
    other = ChatTemplate(write_model(tmp_path / "other", "{{ messages[0].content }}", QWEN_SPECIAL))
    assert other.render([{"role": "user", "content": "x"}], [], prompt=True) == "x"


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ (7 ** (7 ** 12)) is even }}",
        "{% for a in range(99999) %}{{ [('a' * 10 ** 8) in ('a' * 10 ** 8 ~ a)][:0] }}{% endfor %}",
    ],
)
def test_the_time_of_a_template_is_bounded(template: str) -> None:
    process = TemplateProcess(cpu_s=0.2)
    with pytest.raises(TemplateError, match=r"more than 0\.2 s of CPU time"):
        process.render(template, {})
    assert process.render("{{ a }}", {"a": 1}) == "1"
    process.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGKILL])
def test_signals_to_every_process_of_a_job_change_no_rendering(number: signal.Signals) -> None:
    process = TemplateProcess()
    process.compile("{{ a }}")
    child = process._process._process
    assert child is not None
    os.kill(child.pid, number)
    if number == signal.SIGKILL:  # by a lack of memory, for example
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process.render("{{ a }}", {"a": 1}) == "1"
    assert (process._process._process is child) == (number != signal.SIGKILL)
    process.close()


def test_the_time_is_bounded_where_the_timer_s_signal_is_ignored() -> None:
    before = signal.signal(signal.SIGPROF, signal.SIG_IGN)
    process = TemplateProcess(cpu_s=0.2)
    try:
        with pytest.raises(TemplateError, match=r"more than 0\.2 s of CPU time"):
            process.render("{{ (7 ** (7 ** 12)) is even }}", {})
    finally:
        signal.signal(signal.SIGPROF, before)
        process.close()


def test_values_reach_a_template_as_they_are() -> None:
    """Also those that no other encoding than JSON has, and in a fork, which must not use its parent's process."""
    process = TemplateProcess()
    values = {"big": 10**40, "nan": float("nan"), "half": "\ud800", "none": None, "list": [1.5, True, {"a": "\n"}]}
    source = "{{ big }} {{ nan }} {{ half }} {{ none }} {{ list }}"
    expected = "1" + "0" * 40 + " nan \ud800 None [1.5, True, {'a': '\\n'}]"
    assert process.render(source, values) == expected
    child = os.fork()
    if child == 0:
        os._exit(0 if process.render("{{ a }}", {"a": 1}) == "1" else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert process.render(source, values) == expected
    with pytest.raises(TemplateError, match="no JSON data"):
        process.render(source, {"a": object()})
    process.close()


def test_long_white_space_before_a_control_token_is_split_in_one_pass() -> None:
    tokens = [AddedToken(1, "<m>", True, True, False), AddedToken(2, "<r>", True, False, True)]
    control = ControlTokens([*tokens, AddedToken(3, "<n>", True, False, False)])
    assert control.split("a   <m> b<r>   c <n>  <m><m>") == ["a", 1, " b", 2, "c ", 3, 1, 1]
    space = " " * 1_000_000  # read anew from each of its characters it would take days
    assert control.split(f"x{space}y") == [f"x{space}y"]


def test_an_assertion_of_a_filter_is_the_template_s_error(tmp_path: Path) -> None:
    template = ChatTemplate(write_model(tmp_path, "{{ 'abcdefgh'|truncate(1) }}", QWEN_SPECIAL))
    with pytest.raises(ModelError, match="conversation"):
        template.render([{"role": "user", "content": "x"}], [], prompt=True)


def test_a_lone_surrogate_of_a_template_is_replaced(tmp_path: Path) -> None:
    source = json.loads("\"{{ '\\\\ud800' }}\"")
    assert ChatTemplate(write_model(tmp_path, source, QWEN_SPECIAL)).render([], [], prompt=True) == "?"
