"""Grammars of replies: checks them before vLLM compiles them, and says which tokens they allowed.

vLLM masks the logits by xgrammar before it samples, and returns no masks. A mask follows from the grammar, the
tokenizer and the reply's tokens, so the same compiler computes it again here. vLLM compiles in a thread that nothing
can stop, and some schemas take hours: a `LimitedProcess` (`grammar_check.py`) compiles a grammar first.
Invariant: the set of a token contains the token, or is missing.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np
import xgrammar

from agentrl.core.errors import GrammarNotCheckedError, GrammarRefusedError
from agentrl.core.limited_process import LimitedProcess
from agentrl.core.tokens import ExcludedTokens, KeptCount, KeptSets

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig

    from agentrl.core.records import Int32Array

MAX_CPU_S = 5.0
"""Maximum CPU seconds of a grammar's check."""
MAX_WALL_S = 60.0
"""Maximum seconds of a grammar's check, for which other grammars wait."""
MAX_DEPTH = 72
"""Maximum depth of a grammar's JSON: 64 levels of a schema, as in vLLM, and those around it."""
MAX_VALUES = 20_000
"""Maximum number of values in a grammar's JSON."""
MAX_KEPT_IDS = 1 << 20
"""Number of ids (4 MiB) after which a call's kept sets are recorded no further."""
MAX_SETS_CPU_S = 5.0
"""CPU seconds after which a call's kept sets are recorded no further."""
_MAX_CACHED = 64
_MAX_CACHED_BYTES = 1 << 28
_MAX_CACHED_MASKS = 64


def tokenizer_info(model_path: str, vocabulary: int) -> xgrammar.TokenizerInfo:
    """Return xgrammar's view of a model's tokenizer, built as in vLLM."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=False, local_files_only=True)
    return xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocabulary)


def enforces_grammars(config: VllmConfig) -> bool:
    """Whether vLLM enforces grammars, and continues them after an interruption.

    It continues them by a patch (`vllm_worker`) of the process that imports the worker, which with several GPUs is not
    the engine core's.
    """
    has_tokenizer = not config.model_config.skip_tokenizer_init
    return has_tokenizer and config.parallel_config.distributed_executor_backend == "uni"


class Grammars:
    """The grammars that an engine has compiled.

    Args:
        model_path: directory of the model.
        vocabulary: size of the model's vocabulary.
    """

    def __init__(self, model_path: str, vocabulary: int) -> None:
        self._path, self._vocabulary = model_path, vocabulary
        module, arguments = f"{__package__}.grammar_check", (model_path, str(vocabulary))
        self._checks = LimitedProcess(module, *arguments, cpu_s=MAX_CPU_S, wall_s=MAX_WALL_S)
        self._compiler: xgrammar.GrammarCompiler | None = None
        self._compiled: OrderedDict[str, ReplyGrammar | GrammarRefusedError] = OrderedDict()
        self._lock = asyncio.Lock()

    async def compile(self, grammar: str) -> ReplyGrammar:
        """Compile a structural tag of xgrammar.

        Raises:
            GrammarRefusedError: it is too large, it does not compile within `MAX_CPU_S`, or its masks are slow.
            GrammarNotCheckedError: the check failed, and may succeed later.
        """
        if grammar not in self._compiled:
            _check_size(grammar)
            async with self._lock:
                if grammar not in self._compiled:
                    try:
                        self._compiled[grammar] = await asyncio.to_thread(self._compile, grammar)
                    except GrammarRefusedError as error:
                        self._compiled[grammar] = error
        compiled = self._compiled[grammar]
        self._compiled.move_to_end(grammar)
        self._drop_oldest()
        if isinstance(compiled, GrammarRefusedError):
            raise GrammarRefusedError(str(compiled))
        return compiled

    def close(self) -> None:
        """End the process that checks grammars."""
        self._checks.close()

    def _drop_oldest(self) -> None:
        sizes = {name: each.size for name, each in self._compiled.items() if isinstance(each, ReplyGrammar)}
        total = sum(sizes.values())
        while len(self._compiled) > 1 and (len(self._compiled) > _MAX_CACHED or total > _MAX_CACHED_BYTES):
            name, _ = self._compiled.popitem(last=False)
            total -= sizes.get(name, 0)

    def _compile(self, grammar: str) -> ReplyGrammar:
        try:
            kind, answer = self._checks.ask(grammar, grammar)  # again, if others filled its memory
        except OSError as error:
            raise GrammarNotCheckedError(f"the grammar of the reply is not checked: {error}") from error
        if kind in ("ended", "late"):
            raise GrammarNotCheckedError(f"the grammar of the reply is not checked: {answer}")
        if kind != "done":
            reason = re.sub(r"^\[[\d:]+\] \S+: ", "", str(answer))  # time and place in xgrammar's source
            raise GrammarRefusedError(f"the grammar of the reply does not compile: {reason}")
        if self._compiler is None:
            info = tokenizer_info(self._path, self._vocabulary)
            self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        return ReplyGrammar(self._compiler.compile_structural_tag(grammar), self._vocabulary)


def _check_size(grammar: str) -> None:
    """Refuse a grammar whose size alone makes it slow.

    Raises:
        GrammarRefusedError: it is too deep, or has too many values.
    """
    try:
        level = [json.loads(grammar)]
    except RecursionError:
        raise GrammarRefusedError("the grammar of the reply is nested too deeply") from None
    count = depth = 0
    while level:
        count, depth = count + len(level), depth + 1
        if depth > MAX_DEPTH or count > MAX_VALUES:
            raise GrammarRefusedError(
                f"the grammar of the reply is too large: at most {MAX_DEPTH} levels and {MAX_VALUES:,} values"
            )
        level = [
            child
            for value in level
            for child in (value.values() if isinstance(value, dict) else value if isinstance(value, list) else ())
        ]


class ReplyGrammar:
    """A compiled grammar."""

    def __init__(self, compiled: xgrammar.CompiledGrammar, vocabulary: int) -> None:
        self._compiled = compiled
        self._vocabulary = vocabulary
        self.size = compiled.memory_size_bytes

    def kept_sets(self, token_ids: Sequence[int], sampled_before: int, stops: Sequence[int]) -> KeptSets:
        """Return the tokens that the grammar allowed at each place of a reply.

        Sets beyond `MAX_KEPT_IDS` and `MAX_SETS_CPU_S` are missing.

        Args:
            token_ids: the reply's tokens so far.
            sampled_before: number of tokens whose sets are not returned.
            stops: tokens that end a reply.
        """
        matcher = xgrammar.GrammarMatcher(self._compiled, override_stop_tokens=list(stops) or None)
        mask = xgrammar.allocate_token_bitmask(1, self._vocabulary)
        sets: list[Int32Array | ExcludedTokens | KeptCount] = []
        by_mask: dict[bytes, Int32Array | ExcludedTokens | KeptCount] = {}  # within a string, most tokens share one
        recorded, deadline_s = 0, time.thread_time() + MAX_SETS_CPU_S
        for number, token in enumerate(token_ids):
            if recorded >= MAX_KEPT_IDS or time.thread_time() > deadline_s:
                break
            if number >= sampled_before:
                matcher.fill_next_token_bitmask(mask, 0)
                content = mask.numpy().tobytes()
                if content not in by_mask:
                    if len(by_mask) == _MAX_CACHED_MASKS:
                        by_mask.clear()
                    by_mask[content] = self._set(content)
                kept = by_mask[content]
                sets.append(kept)
                match kept:
                    case np.ndarray():
                        recorded += len(kept)
                    case ExcludedTokens(ids):
                        recorded += len(ids)
            if not matcher.accept_token(token):  # vLLM sampled it without the grammar
                del sets[max(number - sampled_before, 0) :]
                break
            if matcher.is_terminated():
                break
        sets += [KeptCount.MISSING] * (len(token_ids) - sampled_before - len(sets))
        return KeptSets.of(sets)

    def _set(self, mask: bytes) -> Int32Array | ExcludedTokens | KeptCount:
        allows = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[: self._vocabulary].astype(bool)
        if allows.all():
            return KeptCount.NONE
        if 2 * np.count_nonzero(allows) > self._vocabulary:
            return ExcludedTokens(np.flatnonzero(~allows).astype(np.int32))
        return np.flatnonzero(allows).astype(np.int32)
