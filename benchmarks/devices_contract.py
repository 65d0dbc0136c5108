"""The part `contract` of `benchmarks.devices`: vLLM's model runner V2 keeps the engine contract.

Runs the contract suites of adapters, of full weights and of what is recorded through Triton's interpreter. Takes half
an hour, so it runs only with `--part contract`.
"""

from __future__ import annotations

import re
import subprocess
import sys

SUITES = ("v2_adapters", "v2_full", "v2_capture:qwen3_moe", "v2_capture_adapters")


def figures(quick: bool) -> dict[str, float | None]:
    """Count the tests of all suites; a suite that does not report its tests counts as one failure."""
    passed = failed = 0
    for suite in SUITES[2:3] if quick else SUITES:
        command = [sys.executable, "-m", "pytest", "-q", "tests/contract", f"--vllm-suite={suite}"]
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        last = next((line for line in reversed(ran.stdout.splitlines()) if re.search(r"\d (passed|failed)", line)), "")
        counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|error)", last)}
        print(f"{suite}: {last.strip('= ') or f'exit code {ran.returncode}'}", flush=True)
        passed += counts.get("passed", 0)
        failed += max(counts.get("failed", 0) + counts.get("error", 0), ran.returncode != 0)
    return {"v2_contract_passed": passed, "v2_contract_failed": failed}
