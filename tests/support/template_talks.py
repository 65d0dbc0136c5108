"""Conversations in chat templates that rewrite history, compared with what the engine sampled."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

import agentrl
from agentrl.config.fields import resolve_package_directory
from agentrl.core.ports import GenerateRequest
from agentrl.core.records import EpisodeHeader, EpisodeSpec, PolicyVersion, SeatBinding, Task
from agentrl.core.reply_formats import THINKING
from agentrl.engines.scripted import ScriptedEngine
from agentrl.environment.registry import name_of
from agentrl.journal.entries import TurnEntry
from agentrl.journal.memory import MemoryJournal
from agentrl.journal.rows import assemble_trajectories
from agentrl.rollout.chat.chat_format import TemplateChatFormat
from agentrl.rollout.chat.template_checks import RewriteCause
from agentrl.rollout.runner import EpisodeRunner
from agentrl.testing.execution import PARTITION, POLICY, plain_rollout_settings, wire_dispatcher

MARK = re.compile(
    r"<\|[^|<>\n{}'\"]{1,40}\|?>|<[a-z_]{1,30}\|>|<｜[^｜\n]{1,40}｜>|</?(?:start_of_turn|end_of_turn|bos|eos|s|unk)>"
    r"|\[/?(?:INST|TOOL_CALLS|TOOL_RESULTS|AVAILABLE_TOOLS|SYSTEM_PROMPT|THINK|ARGS|CALL_ID)\]"
)
"""Marks in a template that are special tokens of its family."""
BEGIN_AND_END = {
    "deepseek": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "llama3": ("<|begin_of_text|>", "<|eot_id|>"),
    "gemma": ("<bos>", "<eos>"),
    "cohere": ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
    "phi": ("<s>", "<|endoftext|>"),
    "gpt": ("<|startoftext|>", "<|return|>"),
    "glm": ("", "<|endoftext|>"),
}

CHATML = """
{%- if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}
{%- for call in m.tool_calls or [] -%}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor %}<|im_end|>\n{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"""
_CONTENT = "{{ m.content }}"
PLANTED: Mapping[RewriteCause, str] = {
    "thinking": CHATML.replace(
        _CONTENT, "{% set parts = m.content.split('</think>') %}{{ m.content if loop.last else parts[-1] }}"
    ),
    "whitespace": CHATML.replace(_CONTENT, "{{ m.content | trim }}"),
    "tool_results": CHATML.replace(
        "{%- for m in messages %}",
        "{%- for m in messages %}{% if m.role == 'tool' and not loop.last %}{% continue %}{% endif %}",
    ).replace(_CONTENT, "{{ m.content }}{% if m.role == 'tool' %} of {{ messages | length }}{% endif %}"),
    "tools": CHATML.replace("{%- if tools %}", "{%- if false %}").replace(
        _CONTENT, "{% if loop.last %}{{ tools | tojson if tools else '' }}{% endif %}{{ m.content }}"
    ),
    "date": f"<|im_start|>system\n{{{{ strftime_now('%d %b %Y') }}}}<|im_end|>\n{CHATML}",
    "prompt": CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant, now\n{% endif %}"),
    "history": f"<|im_start|>system\n{{{{ messages | length }}}}<|im_end|>\n{CHATML}",
}
"""Templates that rewrite history in one way each."""


class Talk(agentrl.Environment):
    """Three questions of a user."""

    seats = ("solver",)

    async def run(self, ctx: agentrl.EpisodeContext) -> None:
        """Ask them."""
        agent = ctx.agent("solver")
        for question in ("One?", "Two?", "Three?"):
            await agent.act(agentrl.user(question))
        agent.reward(1.0)


def model(root: Path, name: str, template: str, marks: Sequence[str] = ()) -> Path:
    """A model directory without weights for a template."""
    directory = root / name
    directory.mkdir()
    begin, end = next((pair for key, pair in BEGIN_AND_END.items() if name.startswith(key)), ("", "<|im_end|>"))
    tokenizer = Tokenizer.from_file(
        str(Path(resolve_package_directory("agentrl.environments.calculator:model"), "tokenizer.json"))
    )
    special = dict.fromkeys([*MARK.findall(template), *marks, *(mark for mark in (begin, end) if mark)])
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in special])
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in (*THINKING[0], "<tool_call>", "</tool_call>")])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(template)
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": begin, "eos_token": end}))
    return directory


def play(
    environment: type[agentrl.Environment], chat: TemplateChatFormat, texts: Sequence[str]
) -> tuple[EpisodeHeader, int, Counter[str]]:
    """An episode in which the engine says `texts`: its header, its rows, and what differs from the engine's log."""
    stops = chat.stop_token_ids
    replies = [ids if (ids := chat.encode(text))[-1] in stops else [*ids, stops[0]] for text in texts]
    log: list[tuple[list[int], list[int]]] = []

    def script(request: GenerateRequest, policy: str, version: PolicyVersion) -> list[int]:
        log.append((request.token_ids.tolist(), replies[len(log)]))
        return log[-1][1]

    class Runner(EpisodeRunner):
        def __init__(self, **services: Any) -> None:
            super().__init__(**{**services, "chat_format": chat})

    async def played() -> EpisodeHeader:
        engine = ScriptedEngine(script, versions={POLICY: PolicyVersion(POLICY, 0, 0)})
        settings = plain_rollout_settings(max_turns=8, max_tokens=4096)
        failures: list[BaseException] = []
        dispatcher, _ = wire_dispatcher(environment, engine, journal, settings, failures, runner_type=Runner)
        ended: list[EpisodeHeader] = []
        seats = {seat: SeatBinding(POLICY) for seat in environment.seats}
        task = Task(id="t", data={"question": "Weather?"})
        spec = EpisodeSpec(
            episode_id="e0", environment=name_of(environment), task=task, seed=1, seats=seats, group_id="g0"
        )
        dispatcher.worker.submit(spec, ended.append)
        await dispatcher.worker.drain()
        if failures:
            raise failures[0]
        if ended[0].drop_reason:
            print(dispatcher.worker.last_failure, flush=True)
        return ended[0]

    journal = MemoryJournal()
    header = asyncio.run(played())
    return header, *_compared(header, journal, chat, log)


def _compared(
    header: EpisodeHeader, journal: MemoryJournal, chat: TemplateChatFormat, log: Sequence[tuple[list[int], list[int]]]
) -> tuple[int, Counter[str]]:
    """Number of rows; turns whose tokens are not the engine's, and replies that a later context has otherwise."""
    entries = journal.turn_log(PARTITION).read(header.episode_id, header.attempt)
    if header.drop_reason:
        return 0, Counter()
    (trajectory,) = assemble_trajectories(entries)
    turns = [body for entry in entries if isinstance(body := entry.decode(), TurnEntry)]
    numbers = {number: n for n, number in enumerate(sorted({turn.row for turn in turns}))}
    found = Counter[str]()
    trained = sum(int(row.loss_mask.sum()) for row in trajectory.rows)
    found["different"] += trained != sum(len(sampled) for _, sampled in log)
    for turn, (context, sampled) in zip(turns, log, strict=True):
        row = trajectory.rows[numbers[turn.row]]
        stop = len(context) + len(sampled)
        found["different"] += row.token_ids[:stop].tolist() != [*context, *sampled]
        found["different"] += not row.loss_mask[len(context) : stop].all()
    for n, (_, sampled) in enumerate(log[:-1]):
        spoken = chat.decode(sampled).rpartition("</think>")[2].strip() if chat.forks else chat.decode(sampled)
        kept = sampled[len(sampled) - len(_tail(chat, sampled, spoken)) : -1] if chat.forks else sampled[:-1]
        for context, _ in log[n + 1 :]:
            found["retokenised"] += not _is_in(kept, context)
    return len(trajectory.rows), +found


def _tail(chat: TemplateChatFormat, sampled: Sequence[int], spoken: str) -> Sequence[int]:
    """The shortest end of sampled tokens that says `spoken`."""
    return next(tail for n in range(1, len(sampled) + 1) if spoken in chat.decode(tail := sampled[-n:]))


def _is_in(part: Sequence[int], whole: Sequence[int]) -> bool:
    return any(list(whole[at : at + len(part)]) == list(part) for at in range(len(whole) - len(part) + 1))
