"""Our readers of tool calls against vLLM's parsers, on what each model family writes."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.core.reply_formats import REPLY_FORMATS
from tests.contract.vllm_suite import MISSING
from tests.reply_samples import FIRST, SECOND

OTHERS = {
    "openai": "vLLM reads it from token ids by openai_harmony",
    "cohere_command3": "vLLM reads it by its own engine, not by this class",
    "phi4_mini_json": "vLLM reads `functools[…]`; the checkpoint's template writes <|tool_call|>",
    "internlm": "vLLM reads one call",
    "functiongemma": "vLLM reads texts only",
}


@pytest.mark.exhaustive
@pytest.mark.vllm
@pytest.mark.slow
def test_calls_are_those_that_vllm_reads() -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip(MISSING)
    script = Path(__file__).with_name("reply_formats_of_vllm.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=280)
    found = json.loads(done.stdout.splitlines()[-1])
    of_models = {name for name, reply_format in REPLY_FORMATS.items() if reply_format.needs_marks}
    assert set(found) == of_models, "each format of a model has vLLM's name for it"
    expected = [["weather", FIRST], ["weather", SECOND]]
    assert {name for name, calls in found.items() if calls != expected} <= OTHERS.keys()
