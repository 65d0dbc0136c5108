"""Grammars of replies: checks them before vLLM compiles them, and says which tokens they allowed.

vLLM masks the logits by xgrammar before it samples, and returns no masks. A mask follows from the grammar, the
tokenizer and the reply's tokens, so the same compiler computes it again here. vLLM compiles in a thread that nothing
can stop, and some schemas take hours: a `LimitedProcess` (`grammar_check.py`) compiles a grammar first.
Invariant: the set of a token contains the token, or is missing.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import numpy as np
import xgrammar

from agentrl.core.errors import GrammarRefusedError
from agentrl.core.limited_process import LimitedProcess, not_started
from agentrl.core.tokens import ExcludedTokens, KeptCount, KeptSets

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentrl.core.records import Int32Array

MAX_CPU_S = 5.0
"""Maximum CPU seconds of a grammar's compilation."""
MAX_KEPT_IDS = 1 << 22
"""Number of ids after which a call's kept sets are recorded no further."""
_CACHED = 64
"""Number of compiled grammars, and of masks of each, that are kept."""


def tokenizer_info(model_path: str, vocabulary: int) -> xgrammar.TokenizerInfo:
    """Return what xgrammar needs of a model's tokenizer, as vLLM makes it."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=False, local_files_only=True)
    return xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocabulary)


class Grammars:
    """The grammars that an engine has compiled.

    Args:
        model_path: directory of the model.
        vocabulary: size of the model's vocabulary.
    """

    def __init__(self, model_path: str, vocabulary: int) -> None:
        self._path, self._vocabulary = model_path, vocabulary
        self._checks = LimitedProcess(f"{__package__}.grammar_check", model_path, str(vocabulary), cpu_s=MAX_CPU_S)
        self._compiler: Any = None
        self._compiled: OrderedDict[str, ReplyGrammar | GrammarRefusedError] = OrderedDict()
        self._lock = asyncio.Lock()

    async def compile(self, grammar: str) -> ReplyGrammar:
        """Compile a structural tag of xgrammar.

        Raises:
            GrammarRefusedError: it does not compile, or not within `MAX_CPU_S`.
        """
        if grammar not in self._compiled:
            async with self._lock:
                if grammar not in self._compiled:
                    try:
                        self._compiled[grammar] = await asyncio.to_thread(self._compile, grammar)
                    except GrammarRefusedError as error:
                        self._compiled[grammar] = error
        found = self._compiled[grammar]
        self._compiled.move_to_end(grammar)
        if len(self._compiled) > _CACHED:
            self._compiled.popitem(last=False)
        if isinstance(found, GrammarRefusedError):
            raise GrammarRefusedError(str(found))
        return found

    def close(self) -> None:
        """End the process that checks grammars."""
        self._checks.close()

    def _compile(self, grammar: str) -> ReplyGrammar:
        try:
            kind, answer = self._checks.ask(grammar, grammar)  # again, if others filled its memory
        except OSError as error:
            raise GrammarRefusedError(not_started(error)) from error
        if kind != "done":
            reason = re.sub(r"^\[[\d:]+\] \S+: ", "", str(answer))  # time and place in xgrammar's source
            raise GrammarRefusedError(f"the grammar of the reply does not compile: {reason}")
        if self._compiler is None:
            info = tokenizer_info(self._path, self._vocabulary)
            self._compiler = xgrammar.GrammarCompiler(info, max_threads=1)
        return ReplyGrammar(self._compiler.compile_structural_tag(grammar), self._vocabulary)


class ReplyGrammar:
    """A compiled grammar."""

    def __init__(self, compiled: Any, vocabulary: int) -> None:
        self._compiled = compiled
        self._vocabulary = vocabulary
        self._sets: OrderedDict[bytes, Int32Array | ExcludedTokens | KeptCount] = OrderedDict()
        """Kept sets by the bytes of their masks: within a string, many tokens have the same one."""

    def kept_sets(self, token_ids: Sequence[int], sampled_before: int, stops: Sequence[int]) -> KeptSets:
        """Return the tokens that the grammar allowed at each place of a reply.

        Args:
            token_ids: the reply's tokens so far.
            sampled_before: number of tokens whose sets are not returned.
            stops: tokens that end a reply.
        """
        matcher = xgrammar.GrammarMatcher(self._compiled, override_stop_tokens=list(stops) or None)
        mask = xgrammar.allocate_token_bitmask(1, self._vocabulary)
        sets: list[Int32Array | ExcludedTokens | KeptCount] = []
        recorded = 0
        for number, token in enumerate(token_ids):
            if number >= sampled_before and recorded < MAX_KEPT_IDS:
                matcher.fill_next_token_bitmask(mask, 0)
                kept = self._set(mask.numpy().tobytes())
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
        kept = self._sets.get(mask)
        if kept is None:
            allows = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[: self._vocabulary].astype(bool)
            if allows.all():
                kept = KeptCount.NONE
            elif 2 * np.count_nonzero(allows) > self._vocabulary:
                kept = ExcludedTokens(np.flatnonzero(~allows).astype(np.int32))
            else:
                kept = np.flatnonzero(allows).astype(np.int32)
            self._sets[mask] = kept
            if len(self._sets) > _CACHED:
                self._sets.popitem(last=False)
        self._sets.move_to_end(mask)
        return kept
