"""The part of `benchmarks.serving` about `[engine.vllm]`: what reaches vLLM's argument class, and what is refused."""

from __future__ import annotations

from dataclasses import replace

from agentrl.core.errors import ConfigError
from agentrl.engines.vllm.arguments import check_arguments
from tests.unit.test_vllm_arguments import ACCEPTED, REFUSED


def figures(quick: bool) -> dict[str, float | None]:
    """The part's figures."""
    from vllm import AsyncEngineArgs

    from agentrl.config.fields import shipped_example
    from agentrl.engines.vllm.startup import engine_arguments
    from benchmarks.vllm_parts import settings_for

    model = shipped_example("01_tool_use").parents[1] / "environments/calculator/model"
    given = {name: value for name, value in ACCEPTED.items() if name != "compilation_config"}
    settings = settings_for(slots=8, max_context=512, refresh="lazy", adapter_slots=2)
    made = AsyncEngineArgs(**engine_arguments(str(model), replace(settings, arguments=given)))
    passed = [name for name, value in given.items() if getattr(made, name) == value]
    print(f"{len(passed)} of {len(given)} arguments stand in vLLM's class: {', '.join(passed)}")
    refused = {name for name, value, _ in REFUSED if _is_refused(name, value)}
    print(f"refused: {', '.join(sorted(refused))}")
    return {
        "arguments_passed": float(len(passed) == len(given) >= 20),
        "refused_with_reason": float(len(refused)),
    }


def _is_refused(name: str, value: object) -> bool:
    try:
        check_arguments({name: value}, on_gpu=False)
    except ConfigError as error:
        return "is refused: " in str(error)
    return False
