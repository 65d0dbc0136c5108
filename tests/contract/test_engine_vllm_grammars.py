"""Real vLLM under grammars, with a real tokenizer: replies fit them, and are trained within what they allow."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from agentrl.config.policies import PolicyConfig
from agentrl.config.run import RunConfig
from agentrl.config.sections import EnvironmentConfig, ModelConfig
from agentrl.core.errors import GrammarRefusedError
from agentrl.core.records import PolicyVersion, ToolSpec
from agentrl.core.reply_formats import REPLY_FORMATS, parse_hermes
from agentrl.core.tokens import Completion, KeptCount, KeptSets, TrajectoryRow
from agentrl.engines.process import ChildProgram
from agentrl.engines.remote.client import ProcessEngine
from agentrl.gateway.calls import ChatRequest, ReplyForm, ToolChoice
from agentrl.learn.models import load_models
from agentrl.rollout.external.reply_grammar import reply_grammar
from tests.contract.engine_kinds import request
from tests.contract.test_engine_to_trainer import difference, trained
from tests.contract.vllm_suite import MISSING

MODEL = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct"
START = {"solver": PolicyVersion("solver", 0, 0)}
END = 2
"""`<|im_end|>` of SmolLM2."""
END_OF_TURN: dict[str, Any] = {"stop_token_ids": (END,)}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "a reference to nothing": ({"$ref": "#/$defs/nothing"}, ""),
    "a bad pattern": ({"type": "string", "pattern": "(((a"}, ""),
    "an unknown type": ({"type": "nonsense"}, ""),
    "endless": ({"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(9000)}}, "CPU time"),
    "slow masks": ({"type": "string", "pattern": "^(.{0,200}a.{0,200}b){0,20}$"}, "at one place"),
}
TOOLS = [
    ToolSpec(name="weather", description="", parameters={**CITY, "additionalProperties": False}),
    ToolSpec(name="age", description="", parameters=PERSON),
]
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason=MISSING),
    pytest.mark.skipif(not MODEL.is_dir(), reason="models/SmolLM2-135M-Instruct is missing: make smollm2"),
]


def grammar(schema: dict[str, Any]) -> str:
    content = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 2}
    return json.dumps({"type": "structural_tag", "format": content})


def row_of(context: Any, completion: Completion) -> TrajectoryRow:
    size, count = len(context), len(completion.token_ids)
    blank = np.zeros(size, np.int32)
    assert completion.kept is not None
    return TrajectoryRow(
        token_ids=np.concatenate([context, completion.token_ids]),
        loss_mask=np.arange(size + count) >= size,
        logprobs=np.concatenate([blank.astype(np.float32), completion.logprobs]),
        turn_index=np.concatenate([blank - 1, np.zeros(count, np.int32)]),
        spans=(),
        kept=KeptSets(counts=np.concatenate([blank, completion.kept.counts]), ids=completion.kept.ids),
    )


def contains_each_token(completion: Completion) -> bool:
    """Whether each token is in its own kept set, by the definition in the journal's format."""
    assert completion.kept is not None
    at, found = 0, []
    for token, count in zip(completion.token_ids.tolist(), completion.kept.counts.tolist(), strict=True):
        size = count if count > 0 else -1 - count if count else 0
        ids, at = completion.kept.ids[at : at + size].tolist(), at + size
        found.append(count == 0 or (token in ids) == (count > 0))
    return all(found)


async def check_choices(engine: ProcessEngine, context: Any, text: Callable[[Any], str]) -> None:
    """The grammar that `act(choices=…)` makes."""
    elements = [{"type": "const_string", "value": choice} for choice in ("pass", "bet")]
    tag = json.dumps({"type": "structural_tag", "format": {"type": "or", "elements": elements}})
    for seed in range(4):
        call = request(f"choice{seed}", context, max_tokens=8, seed=seed, grammar=tag, **END_OF_TURN)
        completion = await engine.open(f"choice{seed}", "solver").generate(call)
        assert text(completion.token_ids).removesuffix("<|im_end|>") in ("pass", "bet")
        assert contains_each_token(completion)


async def check_forced_calls(engine: ProcessEngine, context: Any, text: Callable[[Any], str]) -> None:
    """Of either tool, as a request of an agent asks for them."""
    forced = ChatRequest(
        model="m", messages=[], tools=TOOLS, tool_choice=ToolChoice("required"), reply_form=ReplyForm("json_object")
    )
    tag = reply_grammar(forced, REPLY_FORMATS["hermes"].call_frame)
    for seed in range(3):
        call = request(f"call{seed}", context, max_tokens=150, seed=seed, temperature=0.6, grammar=tag, **END_OF_TURN)
        completion = await engine.open(f"call{seed}", "solver").generate(call)
        content, calls = parse_hermes(text(completion.token_ids))
        assert content == ""
        assert calls
        for each in calls if completion.finish_reason == "stop" else ():
            (tool,) = (tool for tool in TOOLS if tool.name == each.name)
            jsonschema.validate(each.arguments, tool.parameters)


@pytest.mark.filterwarnings("ignore")  # vLLM's own
def test_only_the_stops_of_a_request_end_its_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import SamplingParams

    from agentrl.engines.weights import vllm_worker

    parameters = SamplingParams(stop_token_ids=[END], ignore_eos=True)
    parameters.update_from_generation_config({"eos_token_id": [END, 0]}, END)
    assert parameters.all_stop_token_ids == {0, END}
    monkeypatch.setattr(vllm_worker, "_create", lambda _, request: set(request.sampling_params.all_stop_token_ids))
    call: Any = SimpleNamespace(sampling_params=parameters, prompt_token_ids=None)
    manager: Any = None
    assert vllm_worker._create_grammar(manager, call) == {END}


def test_replies_fit_their_schema_and_are_trained_within_it() -> None:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    prompt = "<|im_start|>user\nTell me about the weather.<|im_end|>\n<|im_start|>assistant\n"
    context = np.array(tokenizer.encode(prompt).ids, np.int32)
    options = {"model_path": str(MODEL), "adapter_slots": 0, "slots": 4, "dtype": "float32", "max_context": 256}
    arguments = {**options, "refresh": "turn"}
    program = ChildProgram(
        "agentrl.engines.vllm.engine:VllmEngine.load", arguments, module="agentrl.engines.vllm.process"
    )

    def text(ids: Any) -> str:
        return str(tokenizer.decode([token for token in ids.tolist() if token != END], skip_special_tokens=False))

    async def main() -> list[Completion]:
        engine = await ProcessEngine(program, START).ready()
        assert engine.capabilities.grammars

        def ask(name: str, schema: dict[str, Any] | None, tokens: int = 120, **more: Any) -> Any:
            enforced = {} if schema is None else {"grammar": grammar(schema)}
            call = request(name, more.pop("context", context), max_tokens=tokens, **END_OF_TURN, **enforced, **more)
            return engine.open(name, "solver").generate(call)

        # At temperature 2 the model writes nonsense, in which each value has the type of the schema.
        refused = {name: asyncio.ensure_future(ask(name, schema)) for name, (schema, _) in HOSTILE.items()}
        free = asyncio.ensure_future(ask("free", None, 30))
        aborted = asyncio.ensure_future(ask("aborted", {"type": "string", "minLength": 99}))  # waits for the others
        await asyncio.sleep(0.1)
        engine.abort("aborted")
        completions = await asyncio.gather(*[ask(f"r{n}", PERSON, seed=n, temperature=2.0 - n / 4) for n in range(4)])
        for completion in completions:
            assert completion.finish_reason == "stop"
            jsonschema.validate(json.loads(text(completion.token_ids)), PERSON)
        for name, (_, reason) in HOSTILE.items():
            with pytest.raises(GrammarRefusedError, match=f"does not compile: .*{reason}"):
                await refused[name]
        assert ((await aborted).finish_reason, len((await aborted).token_ids)) == ("abort", 0)
        assert (await free).kept is None
        await check_choices(engine, context, text)
        await check_forced_calls(engine, context, text)
        # A turn that is cut and continues is in the middle of its grammar.
        first = await ask("cut", PERSON, 5, seed=8)
        whole = np.concatenate([context, first.token_ids])
        second = await ask("rest", PERSON, 100, seed=8, context=whole, sampled_before=5)
        jsonschema.validate(json.loads(text(np.concatenate([first.token_ids, second.token_ids]))), PERSON)
        assert not np.isin(second.kept.counts, (KeptCount.NONE, KeptCount.MISSING)).any()
        await engine.close()
        return [*completions, first]

    completions = asyncio.run(main())
    assert all(map(contains_each_token, completions))
    config = RunConfig(
        environment=EnvironmentConfig(id="test"),
        model=ModelConfig(path=str(MODEL), dtype="float32"),
        policies={"solver": PolicyConfig()},
    )
    model = load_models(config.trainer_plan, torch.device("cpu"))["solver"]
    for number, completion in enumerate(completions):
        temperature = 2.0 - number / 4 if number < 4 else 1.0
        row = row_of(context, completion)
        row = row.with_column("temperatures", np.full(len(row.token_ids), temperature))
        found = difference(model, trained(row))
        assert len(found) == len(completion.token_ids)
        assert max(map(abs, found.values())) < 1e-3
        without = difference(model, trained(row.with_column("kept", None)))
        assert min(without.values()) < -1, "the grammar removed next to nothing"
