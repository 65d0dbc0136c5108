"""What installing agentrl brings along."""

from __future__ import annotations

from importlib.metadata import distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

MAX_CORE_PACKAGES = 25


def installed_with(name: str) -> set[str]:
    """The distributions that the core of `name` needs, itself left out."""
    found: set[str] = set()
    pending = [name]
    while pending:
        for text in distribution(pending.pop()).requires or []:
            requirement = Requirement(text)
            needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            dependency = canonicalize_name(requirement.name)
            if needed and dependency not in found:
                found.add(dependency)
                pending.append(dependency)
    return found


def test_the_core_installs_few_packages_and_no_heavy_one() -> None:
    packages = installed_with("agentrl")
    assert {"aiohttp", "gymnasium", "numpy", "pydantic"} <= packages
    assert not packages & {"torch", "ray", "transformers", "peft", "vllm"}
    assert len(packages) <= MAX_CORE_PACKAGES, sorted(packages)
