"""What installing agentrl brings along."""

from __future__ import annotations

from benchmarks.first_hour_examples import core_packages

MAX_CORE_PACKAGES = 25


def test_the_core_installs_few_packages_and_no_heavy_one() -> None:
    packages = core_packages()
    assert {"aiohttp", "gymnasium", "numpy", "pydantic"} <= packages
    assert not packages & {"torch", "ray", "transformers", "peft", "vllm"}
    assert len(packages) <= MAX_CORE_PACKAGES, sorted(packages)
