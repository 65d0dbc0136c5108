"""The process that compiles grammars first, `python -m agentrl.engines.vllm.grammar_check`; see `grammars.py`."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from agentrl.core.limited_process import serve

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_CONVERSION_S = 0.5
"""Maximum CPU seconds of the conversion of a schema into rules, for which vLLM's event loop waits at each request."""


def _load() -> Callable[[Any], tuple[str, Any]]:
    import xgrammar

    from agentrl.engines.vllm.grammars import tokenizer_info

    info = tokenizer_info(sys.argv[3], int(sys.argv[4]))

    def check(grammar: str) -> tuple[str, Any]:
        started_s = time.process_time()
        try:
            xgrammar.Grammar.from_structural_tag(grammar)
            if time.process_time() - started_s > MAX_CONVERSION_S:
                return "error", f"its conversion takes more than {MAX_CONVERSION_S:g} s of CPU time"
            xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False).compile_structural_tag(grammar)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - xgrammar raises many kinds
            return "error", " ".join(str(error).split())[:500] or type(error).__name__
        return "done", None

    return check


if __name__ == "__main__":
    serve(_load)
