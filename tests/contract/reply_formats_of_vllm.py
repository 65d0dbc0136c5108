"""Run by `test_reply_formats_vllm.py` in a process of its own: what vLLM's parsers read in the samples, as JSON."""

import json
import sys
import tempfile
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager

from agentrl.config.fields import resolve_package_directory
from agentrl.core.reply_formats import REPLY_FORMATS
from tests.reply_samples import CALLS, WEATHER


def tokenizer(markup: tuple[str, ...]) -> PreTrainedTokenizerFast:
    """The shipped tokenizer with the marks of a format as tokens."""
    made = Tokenizer.from_file(
        str(Path(resolve_package_directory("agentrl.environments.calculator:model"), "tokenizer.json"))
    )
    also = ("<think>", "</think>", "<|start|>", "<|end|>", "<s>", "</s>")
    made.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in (*markup, *also)])
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "tokenizer.json")
        made.save(str(path))
        return PreTrainedTokenizerFast(tokenizer_file=str(path), eos_token="</s>", bos_token="<s>")


def main() -> None:
    """Print a line of JSON: by format, the calls, or why there are none."""
    specs = [{"type": "function", "function": {"name": WEATHER.name, "parameters": dict(WEATHER.parameters)}}]
    request = ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "?"}], tools=specs)
    found: dict[str, object] = {}
    for name in REPLY_FORMATS.keys() & set(ToolParserManager.list_registered()):
        try:
            parser = ToolParserManager.get_tool_parser(name)(tokenizer(REPLY_FORMATS[name].markup), request.tools)
            calls = parser.extract_tool_calls(CALLS[name], request).tool_calls
            found[name] = [[call.function.name, json.loads(call.function.arguments)] for call in calls]
        except Exception as error:  # noqa: BLE001 - whatever a parser raises is its answer
            found[name] = f"{type(error).__name__}: {error}"
    print(json.dumps(found), file=sys.__stdout__)


main()
