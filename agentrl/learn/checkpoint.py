"""A learner's state on disk: safetensors and JSON, never pickle; and the error of a disk that refuses.

`<directory>/<policy>/`: `weights.safetensors` (what the optimizer changes, float32), `optimizer.safetensors` (AdamW's
moments), `rng.json` (torch's random state), `state.json` (step, version, last report). Owns: this layout. Does not own:
syncing, and the manifest that makes a checkpoint count (both the orchestrator's).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from agentrl.core.errors import StorageError, TrainerError
from agentrl.core.files import remedy
from agentrl.core.records import PolicyVersion
from agentrl.core.training_records import StepReport

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class LearnerState(msgspec.Struct, frozen=True, kw_only=True):
    """Where a policy's learner stands."""

    step: int
    version: PolicyVersion
    """The last published version."""
    report: StepReport | None
    """Of the last applied step."""


Parameters = Mapping[str, nn.Parameter]
"""What an optimizer changes, by name, in the optimizer's order."""


def save(directory: Path, parameters: Parameters, optimizer: torch.optim.Optimizer | None, state: LearnerState) -> None:
    """Write a learner's state into `directory`, which must not exist.

    Raises:
        StorageError: the disk refused, or the directory exists.
    """
    weights = {name: parameter.detach().contiguous() for name, parameter in parameters.items()}
    rng = {"torch_cpu": torch.get_rng_state().numpy().tobytes().hex()}
    with writing(directory):
        directory.mkdir(parents=True)
        save_file(weights, directory / "weights.safetensors")
        save_file(_moments(parameters, optimizer), directory / "optimizer.safetensors")
        (directory / "rng.json").write_text(json.dumps(rng))
        (directory / "state.json").write_bytes(msgspec.json.encode(state))


def load(directory: Path, parameters: Parameters, optimizer: torch.optim.Optimizer | None) -> LearnerState:
    """Put a learner's state back in place; the next step is bit-identical to the one that would have followed.

    Raises:
        TrainerError: the directory lacks a file, or holds another policy's or another configuration's state.
    """
    try:
        weights = load_file(directory / "weights.safetensors")
        moments = load_file(directory / "optimizer.safetensors")
        rng = json.loads((directory / "rng.json").read_text())
        state = msgspec.json.decode((directory / "state.json").read_bytes(), type=LearnerState)
    except (OSError, SafetensorError, ValueError) as error:
        raise TrainerError(f"checkpoint {directory} cannot be read: {error}; resume from an older one") from error
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if shapes != {name: tuple(parameter.shape) for name, parameter in parameters.items()}:
        raise TrainerError(
            f"the checkpoint in {directory} holds other weights than the configuration trains; "
            "resume with the model and the policy sections the run was started with"
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name])
    if optimizer is not None and moments:
        by_parameter: dict[int, dict[str, Any]] = {}
        for index, name in enumerate(parameters):
            by_parameter[index] = {moment: moments[f"{name}|{moment}"] for moment in _MOMENTS}
        optimizer.load_state_dict({"state": by_parameter, "param_groups": optimizer.state_dict()["param_groups"]})
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(rng["torch_cpu"]), dtype=torch.uint8))
    return state


def _moments(parameters: Parameters, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """AdamW's state by parameter name; empty before the first step."""
    if optimizer is None:
        return {}
    return {
        f"{name}|{moment}": optimizer.state[parameter][moment].contiguous()
        for name, parameter in parameters.items()
        if parameter in optimizer.state
        for moment in _MOMENTS
    }


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around the writing of `path`.

    Raises:
        StorageError: the system or safetensors, which has errors of its own, could not write.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or " ".join(str(error).split())
        mend = remedy(error) if isinstance(error, OSError) else "free space or make it writable"
        raise StorageError(
            f"{path}: could not be written ({reason}); {mend}, then start the run again with --resume"
        ) from error
