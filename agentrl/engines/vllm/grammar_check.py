"""The process that compiles grammars first, `python -m agentrl.engines.vllm.grammar_check`; see `grammars.py`."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import xgrammar

from agentrl.core.limited_process import serve
from agentrl.engines.vllm.grammars import tokenizer_info

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MAX_CONVERSION_S = 0.5
"""Maximum CPU seconds of the conversion of a schema into rules, for which vLLM's event loop waits at each request."""
MAX_MASK_S = 0.05
"""Maximum CPU seconds of a mask, for which vLLM's step waits with all its requests."""
_WALK_TOKENS = 64
_WALKS_CPU_S = 1.0
"""CPU seconds after which no more masks are measured."""


def mask_times(compiled: xgrammar.CompiledGrammar, info: xgrammar.TokenizerInfo) -> Iterator[float]:
    """Yield the CPU seconds of each mask of random replies: of any tokens, and of single bytes, which soon end a
    string."""
    random = np.random.default_rng(0)
    single_bytes = np.zeros(info.vocab_size, bool)
    single_bytes[[token for token, text in enumerate(info.decoded_vocab) if len(text) == 1]] = True
    mask = xgrammar.allocate_token_bitmask(1, info.vocab_size)
    for tokens in (True, single_bytes, True, single_bytes):
        matcher = xgrammar.GrammarMatcher(compiled)
        for _ in range(_WALK_TOKENS):
            started_s = time.process_time()
            matcher.fill_next_token_bitmask(mask, 0)
            yield time.process_time() - started_s
            allows = np.unpackbits(mask.numpy().view(np.uint8)[0], bitorder="little")[: info.vocab_size].astype(bool)
            ids = np.flatnonzero(allows & tokens)
            if not len(ids):
                ids = np.flatnonzero(allows)
            if not len(ids) or not matcher.accept_token(int(random.choice(ids))) or matcher.is_terminated():
                break


def refusal(grammar: str, info: xgrammar.TokenizerInfo) -> str:
    """Return why a structural tag is refused; "" if it is not."""
    started_s = time.process_time()
    xgrammar.Grammar.from_structural_tag(grammar)
    if time.process_time() - started_s > MAX_CONVERSION_S:
        return f"its conversion takes more than {MAX_CONVERSION_S:g} s of CPU time"
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    compiled = compiler.compile_structural_tag(grammar)
    started_s = time.process_time()
    for mask_s in mask_times(compiled, info):
        if mask_s > MAX_MASK_S:
            return f"the tokens that it allows take more than {MAX_MASK_S:g} s of CPU time at one place"
        if time.process_time() - started_s > _WALKS_CPU_S:
            break
    return ""


def _load() -> Callable[[Any], tuple[str, Any]]:
    info = tokenizer_info(sys.argv[3], int(sys.argv[4]))

    def check(grammar: str) -> tuple[str, Any]:
        try:
            reason = refusal(grammar, info)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - xgrammar raises many kinds
            reason = " ".join(str(error).split())[:500] or type(error).__name__
        return ("error", reason) if reason else ("done", None)

    return check


if __name__ == "__main__":
    serve(_load)
