"""Settings by model size: the learning rate of policies that set none, and what `agentrl doctor FILE --suggest` shows.

Each row of `RECIPES` names the run it was taken from: measured runs of this repository for small models, published
configurations of other libraries for large ones. docs/how-to/settings.md explains the table.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from agentrl.core.errors import ModelError
from agentrl.core.files import count_parameters
from agentrl.core.setting_paths import value_at

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agentrl.config.policies import PolicyConfig
    from agentrl.config.run import RunConfig


class Recipe(NamedTuple):
    """Settings for models up to a size."""

    max_parameters: float
    adapter_learning_rate: float
    full_learning_rate: float
    rank: int
    group_size: int
    step_size: int
    source: str
    """The run, or published configuration, that the row comes from."""


RECIPES = (
    Recipe(1e7, 2e-3, 3e-4, 8, 8, 64, "examples/01 and 05: 0.84 M parameters"),
    Recipe(3e8, 3e-4, 3e-5, 8, 8, 64, "examples/07: SmolLM2-135M, held-out reward 0.15 to 0.98"),
    Recipe(5.5e8, 1e-4, 1e-5, 8, 8, 64, "examples/16 and docs/results/anchors.md: Qwen2.5-Coder-0.5B, adapters"),
    Recipe(1.2e9, 3e-5, 3e-6, 16, 16, 128, "prime-rl examples/basic/reverse-text: Qwen3-0.6B, full weights, 3e-6"),
    Recipe(5e9, 1e-5, 1e-6, 32, 16, 256, "prime-rl examples/basic/alphabet-sort: Qwen3-4B, rank 32, 1e-5"),
    Recipe(math.inf, 1e-5, 1e-6, 32, 16, 512, "prime-rl examples/advanced/qwen3-30b-a3b/math: full weights, 1e-6"),
)
"""Recipes, smallest models first. Where a source has only one of the two learning rates, the other follows from the
factor 10 between adapters and full weights (Schulman et al., 2025, "LoRA Without Regret")."""


NEAR_RATE, NEAR_SIZE = 2.0, 4.0
"""Factors from the suggested learning rate, and from other suggested values, within which a setting is left alone: the
sources cannot tell such values apart. Qwen2.5-Coder-0.5B learned in steps of 64 with groups of 4 at 1e-4; at 4e-4, its
rewards rose and fell."""
HIGH_RATE = 10.0
"""Factor above the suggested learning rate from which a run warns. Qwen2.5-Coder-0.5B gave no usable reply after one
step at 0.03, 300 times the suggested rate."""


class Suggestion(NamedTuple):
    """A setting of a configuration, and the value its model's size suggests."""

    setting: str
    current: str
    suggested: str
    source: str
    is_near: bool
    """Whether the current value is near enough to stay."""

    @classmethod
    def of(cls, setting: str, current: float, suggested: float, source: str, near: float = NEAR_SIZE) -> Suggestion:
        """Compare a value with the suggested one; `near` is the factor within which it stays."""
        is_near = current > 0 and suggested / near <= current <= suggested * near
        return cls(setting, f"{current:g}", f"{suggested:g}", source, is_near)


def recipe_for(parameters: int) -> Recipe:
    """Return the recipe for a model of that many parameters."""
    return next(recipe for recipe in RECIPES if parameters <= recipe.max_parameters)


def with_learning_rates(config: RunConfig, before: Mapping[str, Any]) -> RunConfig:
    """Return the configuration with learning rates by model size for the policies that set none.

    Args:
        config: configuration of the run, with local model directories.
        before: the configuration with which the run was started, as data, whose rates are kept; empty for a new run.

    Raises:
        ModelError: a model's weights cannot be read.
    """
    rates = {
        name: _rate_before(before, name) or _learning_rate(policy, Path(config.base_of(name)))
        for name, policy in config.trained.items()
        if "learning_rate" not in policy.model_fields_set
    }
    new_policies = {
        name: config.trained[name].model_copy(update={"learning_rate": rate}) for name, rate in rates.items()
    }
    return config.model_copy(update={"policies": {**config.policies, **new_policies}}) if new_policies else config


def _rate_before(before: Mapping[str, Any], policy: str) -> float:
    """Return the rate with which a policy was started; 0 if there is none, or the run's files hold something else."""
    value = value_at(before, "policies", policy, "learning_rate")
    return value if isinstance(value, float) and 0 < value < math.inf else 0.0


def high_rates(config: RunConfig) -> Iterator[str]:
    """Yield a warning for each policy whose learning rate is far above that of its model's size.

    Args:
        config: configuration with local model directories; one that cannot be read is left out.
    """
    for name, policy in config.trained.items():
        with contextlib.suppress(ModelError):  # loading the model reports it
            suggested, rate = _learning_rate(policy, Path(config.base_of(name))), policy.learning_rate
            if rate > HIGH_RATE * suggested:
                kind = "full weights" if policy.lora is None else "adapters"
                yield (
                    f"policies.{name}.learning_rate = {rate:g} is {rate / suggested:,.0f} times the usual rate for "
                    f"{kind} of a model of this size, {suggested:g}: the model may be destroyed within a few steps. "
                    "`agentrl doctor FILE --suggest` shows the usual settings"
                )


def suggestions(config: RunConfig) -> Iterator[Suggestion]:
    """Yield the settings of a configuration for which its models' sizes suggest a value.

    Raises:
        ModelError: a model's weights cannot be read.
    """
    for name, policy in config.trained.items():
        recipe = recipe_for(count_parameters(Path(config.base_of(name))))
        rate = recipe.full_learning_rate if policy.lora is None else recipe.adapter_learning_rate
        at = f"policies.{name}"
        yield Suggestion.of(f"{at}.learning_rate", policy.learning_rate, rate, recipe.source, NEAR_RATE)
        yield Suggestion.of(f"{at}.step_size", policy.step_size, recipe.step_size, recipe.source)
        if policy.lora is not None:
            yield Suggestion.of(f"{at}.lora.rank", policy.lora.rank, recipe.rank, recipe.source)
    if config.trained:
        largest = recipe_for(max(count_parameters(Path(config.base_of(name))) for name in config.trained))
        yield Suggestion.of("credit.group_size", config.credit.group_size, largest.group_size, largest.source)


def _learning_rate(policy: PolicyConfig, base: Path) -> float:
    recipe = recipe_for(count_parameters(base))
    return recipe.full_learning_rate if policy.lora is None else recipe.adapter_learning_rate
