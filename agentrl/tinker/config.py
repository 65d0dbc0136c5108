"""The configuration of a server whose clients decide what is sampled and trained: `agentrl serve tinker FILE.toml`.

Its sections are those of a run. A base model is served under the name that clients use; a client's model is an adapter
on it, or a copy of it of which all weights are trained.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from agentrl.config.fields import (
    Fixed,
    Free,
    Label,
    Location,
    Machine,
    NumberUnit,
    Positive,
    Section,
    Variable,
    expand_paths,
    resolve_package_directory,
)
from agentrl.config.load import (
    parse_value,
    read_toml,
    resolve_path,
    setting_differences,
    split_override,
    validate_section,
)
from agentrl.config.policies import AnyPolicy, FrozenPolicy, LoraConfig, PolicyConfig
from agentrl.config.run import RunConfig
from agentrl.config.sections import CheckpointConfig, EngineConfig, EnvironmentConfig, ModelConfig, TrainerConfig
from agentrl.core.errors import ConfigError
from agentrl.core.files import expand_path
from agentrl.core.ids import is_safe_name
from agentrl.core.setting_paths import set_value

ENVIRONMENT = "tinker"
"""Name of the environment of recorded samples."""


_TRAINER_SETTINGS = frozenset({"micro_batch_tokens", "recompute", "sharding"})
"""Settings of `[trainer]` that a server reads."""
_IGNORED_ENGINE_SETTINGS = {
    "capture_routing": "whose trainer replays no experts",
    "publish": "whose versions are always whole",
    "refresh": "whose requests each sample from one version",
}
"""Settings of `[engine]` that a server does not read, and why."""

FIXED: Mapping[str, tuple[str, ...]] = {
    "seed": ("seed",),
    "dtype": ("model", "dtype"),
    "models.NAME.path": ("policies", "NAME", "model"),
    "models.NAME.weights": ("policies", "NAME", "lora"),
}
"""The server's settings that are marked `Fixed`, and where the configuration of its run holds them."""


class ServedModelConfig(Section):
    """A base model that clients train and sample from."""

    path: Fixed[Location[str]]
    """Directory of the model."""
    weights: Fixed[Literal["adapter", "full"]] = "adapter"
    """Weights that a client's model trains: an adapter's, or all (`full`). The models with all weights have one owner,
    and are in memory one at a time."""
    max_rank: Free[Positive] = 32
    """Largest rank of an adapter."""
    tokenizer: Free[Label[str]] = ""
    """Name or directory from which clients load the tokenizer. Empty: `path`, for clients on this machine."""

    @field_validator("path")
    @classmethod
    def _find_model(cls, path: str) -> str:
        return resolve_package_directory(path)


class ServerConfig(Section):
    """The configuration of one server."""

    name: Free[Label[str]] = "server"
    """Name of the server's run directory."""
    directory: Free[Machine[Annotated[str, BeforeValidator(expand_paths)]]] = "runs"
    """Parent directory of the run directory."""
    seed: Fixed[int] = 0
    """Seed of adapters and samples to which the client gives none."""
    keys: Free[Annotated[tuple[Variable[str], ...], Field(min_length=1)]] = ("TINKER_API_KEY",)
    """Environment variables that hold the clients' keys. Each variable is one owner, who sees only its own models."""
    models: Annotated[dict[str, ServedModelConfig], Field(min_length=1)]
    """Base models, by the name that clients use, such as `[models."Qwen/Qwen3-8B"]`."""
    max_models: Free[Annotated[Positive, NumberUnit("models")]] = 8
    """Number of clients' models in memory at once. Others wait on disk until they are needed."""
    dtype: Fixed[Literal["auto", "float32", "bfloat16"]] = "auto"
    """Data type in which the models compute, as `model.dtype` of a run."""
    engine: EngineConfig = EngineConfig()
    trainer: TrainerConfig = TrainerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    def check(self) -> None:
        """Refuse settings that do not fit each other."""
        if not is_safe_name(self.name):
            raise ValueError(f"name: {self.name!r} becomes part of a path: letters, digits, '.', '_' and '-' only")
        for setting in TrainerConfig.model_fields.keys() - _TRAINER_SETTINGS:
            if getattr(self.trainer, setting) != getattr(TrainerConfig(), setting):
                raise ValueError(
                    f"trainer.{setting} changes nothing in a server, which trains in one process with the "
                    f"losses and optimizer settings of its clients' requests; remove it (read: "
                    f"{', '.join(sorted(_TRAINER_SETTINGS))})"
                )
        for setting, reason in _IGNORED_ENGINE_SETTINGS.items():
            if getattr(self.engine, setting) != getattr(EngineConfig(), setting):
                raise ValueError(f"engine.{setting} changes nothing in a server, {reason}; remove it")
        for name, model in self.models.items():
            if model.weights == "full" and "max_rank" in model.model_fields_set:
                raise ValueError(
                    f"models.{name}.max_rank changes nothing with weights = 'full', which allows no adapters; remove it"
                )
        names = [name for model in self.models for name in self.policies_of(model)]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"models: two base models would both be recorded as {repeated[0]!r}; rename one")
        _ = self.run  # checks the engine and the models as a run does

    def check_unchanged(self, before: Mapping[str, Any], run: RunConfig) -> None:
        """Refuse fixed settings that differ from those of the earlier starts; base models may be added or removed.

        Args:
            before: the configuration of the server's run, as data.
            run: the configuration of the run now, with what was chosen.

        Raises:
            ConfigError: the message names the settings, both values, and what to do.
        """
        keys = {
            tuple(self.policies_of(model)[0] if part == "NAME" else part for part in place): key.replace("NAME", model)
            for model in self.models
            for key, place in FIXED.items()
        }
        changed = []
        for difference in setting_differences(before, run):
            key = keys.get(difference.path, "")
            values = [difference.before, difference.now]
            if key.endswith(".weights"):
                values = ["full" if lora is None else "adapter" for lora in values]
            if key:
                changed.append(f"{key} was {values[0]!r} and is {values[1]!r}")
        if changed:
            raise ConfigError(
                f"{'; '.join(changed)}: the models in the server's run directory were trained as before. Restore the "
                "setting, or set another `name` of the server, which begins empty"
            )

    @staticmethod
    def policies_of(model: str) -> tuple[str, str]:
        """Return the names under which the journal records clients' models of a base model, and the base model."""
        name = re.sub(r"[^A-Za-z0-9._-]", "-", model.rpartition("/")[2])[:58] or "model"
        return name, f"{name}-base"

    @property
    def run(self) -> RunConfig:
        """The configuration of the run that holds the server's records.

        Clients' models of a base model are a policy, of whose adapters an engine serves as many as are in memory. Its
        staleness is a number: with "auto", the threads of engine and trainer would depend on the time, and with them
        what a request computes when it is executed again after a kill.
        """
        policies: dict[str, AnyPolicy] = {}
        for name, model in self.models.items():
            trained, base = self.policies_of(name)
            if model.weights == "full":
                policies[trained] = PolicyConfig(model=model.path, max_staleness=1)
            else:
                lora = LoraConfig(rank=model.max_rank)
                policies[trained] = PolicyConfig(model=model.path, lora=lora, max_staleness=self.max_models)
            policies[base] = FrozenPolicy(kind="frozen", model=model.path)
        return RunConfig(
            name=self.name,
            directory=self.directory,
            seed=self.seed,
            environment=EnvironmentConfig(id=ENVIRONMENT),
            model=ModelConfig(dtype=self.dtype),
            policies=policies,
            engine=self.engine,
            trainer=self.trainer,
            checkpoint=self.checkpoint,
        )


def load_server(path: str | Path, overrides: Sequence[str] = ()) -> ServerConfig:
    """Read the configuration of a server from a TOML file, changed by `overrides`.

    Args:
        path: the file. A relative `models.NAME.path` is looked up in the file's directory first.
        overrides: `section.field=value`, as `load` reads them.

    Raises:
        ConfigError: the file cannot be read, or a key or value does not fit.
    """
    source = Path(expand_path(path))
    data = read_toml(source)
    for keys, text in map(split_override, overrides):
        set_value(data, keys, parse_value(text))
    config = validate_section(data, source, ServerConfig)
    models = {
        name: model.model_copy(update={"path": resolve_path(source, model.path, key=f"models.{name}.path")})
        for name, model in config.models.items()
    }
    return config.model_copy(update={"models": models})
