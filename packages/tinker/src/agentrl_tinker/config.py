"""The configuration of a server: `agentrl-tinker FILE.toml`."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from agentrl import RunConfig
from agentrl.parts import InputError

ENVIRONMENT = "tinker"
"""Name of the environment of recorded samples."""
_TRAINER_SETTINGS = frozenset({"micro_batch_tokens", "recompute", "sharding"})
"""Settings of `[trainer]` that a server reads."""
_IGNORED_ENGINE_SETTINGS = {
    "capture_routing": "whose trainer replays no experts",
    "refresh": "whose requests each sample from one version",
}
"""Settings of `[engine]` that a server does not read, and why."""


class ServedModelConfig(BaseModel):
    """A base model that clients train and sample from."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    """Directory of the model."""
    weights: Literal["adapter", "full"] = "adapter"
    """Weights that a client's model trains: an adapter's, or all (`full`). Models with all weights are in memory one at
    a time."""
    max_rank: PositiveInt = 32
    """Largest rank of an adapter."""
    tokenizer: str = ""
    """Name or directory from which clients load the tokenizer. Empty: `path`, for clients on this machine."""


class ServerConfig(BaseModel):
    """The configuration of one server."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = "server"
    """Name of the server's run directory."""
    directory: str = "runs"
    """Parent directory of the run directory."""
    seed: int = 0
    """Seed of adapters and samples to which the client gives none."""
    models: dict[str, ServedModelConfig] = Field(min_length=1)
    """Base models, by the name that clients use, such as `[models."Qwen/Qwen3-8B"]`."""
    max_models: PositiveInt = 8
    """Number of clients' models in memory at once. Others wait on disk until they are needed."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type in which the models compute, as `model.dtype` of a run."""
    engine: dict[str, Any] = {}
    """The section `[engine]` of a run."""
    trainer: dict[str, Any] = {}
    """The section `[trainer]` of a run, as far as a server reads it."""
    checkpoint: dict[str, Any] = {}
    """The section `[checkpoint]` of a run."""

    @model_validator(mode="after")
    def _check(self) -> ServerConfig:
        for setting in self.trainer.keys() - _TRAINER_SETTINGS:
            raise ValueError(
                f"trainer.{setting} changes nothing in a server, which trains in one process with the losses and "
                f"optimizer settings of its clients' requests; remove it (read: {', '.join(sorted(_TRAINER_SETTINGS))})"
            )
        for setting in self.engine.keys() & _IGNORED_ENGINE_SETTINGS.keys():
            reason = _IGNORED_ENGINE_SETTINGS[setting]
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
        return self

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
        policies: dict[str, Any] = {}
        for name, model in self.models.items():
            trained, base = self.policies_of(name)
            policies[trained] = {"model": model.path, "max_staleness": 1}
            if model.weights == "adapter":
                policies[trained] |= {"lora": {"rank": model.max_rank}, "max_staleness": self.max_models}
            policies[base] = {"kind": "frozen", "model": model.path}
        return RunConfig.model_validate(
            {
                "name": self.name,
                "directory": self.directory,
                "seed": self.seed,
                "environment": {"id": ENVIRONMENT},
                "model": {"dtype": self.dtype},
                "policies": policies,
                "engine": self.engine,
                "trainer": self.trainer,
                "checkpoint": self.checkpoint,
            }
        )


def load_server(path: str | Path, **settings: Any) -> ServerConfig:
    """Read the configuration of a server from a TOML file.

    Args:
        path: the file. A relative `models.NAME.path` is looked up in the file's directory first.
        settings: settings instead of the file's, unless they are None.

    Raises:
        InputError: the file cannot be read, or a key or value does not fit.
    """
    source = Path(path).expanduser()
    try:
        data = tomllib.loads(source.read_text(encoding="utf-8"))
        data |= {name: value for name, value in settings.items() if value is not None}
        for model in data.get("models", {}).values():
            beside = source.parent / str(model.get("path", ""))
            if "path" in model and beside.is_dir():
                model["path"] = str(beside)
        return ServerConfig.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise InputError(f"{source}: {f'{place}: ' if place else ''}{first['msg']}") from None
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"{source}: the configuration cannot be read: {error}") from None
