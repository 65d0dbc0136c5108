"""Weights a run is given besides those it makes: found, checked against the base model, served; and how many places for
adapters all of them need.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from agentrl.config.policies import FrozenPolicy, PastPolicy, PolicyConfig
from agentrl.core.errors import EngineError, InputError
from agentrl.core.files import WEIGHT_FILES, sha256_of
from agentrl.core.records import PolicyVersion, WeightsRef
from agentrl.orchestrator.versions import record_durably

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentrl.config.run import RunConfig
    from agentrl.core.ports import Engine
    from agentrl.journal.port import JournalStore

GIVEN = -1
"""Lineage of weights that were given by hand; their step is taken from their digest. No run makes such versions, and no
others are called the same, so what was recorded with them is never taken for a run's."""
SPARE = 1
"""Places for adapters over those that are served: what is new is loaded before what is old goes."""


def weights_in(policy: str, directory: str | Path) -> WeightsRef:
    """The trained weights of a policy that lie in a directory, such as a run's `policies/NAME`.

    Raises:
        InputError: there are none.
    """
    directory = Path(directory).resolve()  # `policies/NAME` is a link, which will point elsewhere
    kinds: tuple[Literal["full", "adapter"], ...] = ("full", "adapter")
    for kind in kinds:
        files = [directory / name for name in WEIGHT_FILES[kind]]
        if files[0].is_file():
            try:
                digest = sha256_of(*files)
            except OSError as error:
                raise InputError(f"{error.filename}: cannot be read ({error.strerror})") from error
            version = PolicyVersion(policy, GIVEN, 1 + int(digest[:8], 16))
            return WeightsRef(version=version, path=str(directory), kind=kind, sha256=digest)
    names = " nor ".join(WEIGHT_FILES[kind][0] for kind in kinds)
    raise InputError(
        f"{directory}: no weights there (neither {names}); give a run's policies/NAME. Another base model is given by "
        "model.path"
    )


def given_weights(config: RunConfig) -> list[WeightsRef]:
    """The weights of the frozen policies that are not the base model.

    Raises:
        InputError: there are none where a policy says, or they are an adapter of another base model.
    """
    found = []
    for name, policy in config.of_kind(FrozenPolicy).items():
        if policy.path:
            weights = weights_in(name, policy.path)
            if weights.kind == "adapter":
                check_base(weights, Path(config.model.path))
            found.append(weights)
    return found


def check_base(weights: WeightsRef, base: Path) -> None:
    """Refuse an adapter that says it was trained on another base model than `base`.

    Raises:
        InputError: the policy, the adapter, and both models.
    """
    said = _adapter_config(Path(weights.path)).get("base_model_name_or_path")
    if not isinstance(said, str) or not said:
        return  # it does not say; the engine still compares shapes
    if not _is_same_model(Path(said), base):
        raise InputError(
            f"policies.{weights.version.policy}.path: {weights.path} is an adapter of another base, {said}, and "
            f"model.path is {base}; give an adapter of this one, or mend base_model_name_or_path in its "
            "adapter_config.json if the model was only moved"
        )


async def load_weights(config: RunConfig, engine: Engine, store: JournalStore, given: Sequence[WeightsRef]) -> None:
    """Give an engine the weights it is to serve in place of the base model's, and let the journal say where they lie.

    Raises:
        InputError: they do not fit the base model.
    """
    for weights in given:
        await record_durably(store, weights)
        try:
            await engine.update(weights)
        except EngineError as error:
            raise InputError(f"{weights.path} does not fit {config.model.path}: {error}") from error


def adapter_places(config: RunConfig) -> int:
    """How many adapters an engine must be able to serve at once; 0: none."""
    trained = [policy for policy in config.trained.values() if policy.lora is not None]
    places = sum(policy.max_staleness + 2 for policy in trained)
    places += sum(rank_in(policy) > 0 for policy in config.of_kind(FrozenPolicy).values())
    for past in config.of_kind(PastPolicy).values():
        of = config.policies[past.of]
        if isinstance(of, PolicyConfig) and of.lora is not None:
            places += past.size + SPARE  # one that is played against no more, until its episodes have ended
    return places + SPARE if places else 0


def largest_rank(config: RunConfig) -> int:
    """The largest rank of an adapter that is served; at least 1."""
    trained = [policy.lora.rank for policy in config.trained.values() if policy.lora is not None]
    return max([1, *trained, *(rank_in(policy) for policy in config.of_kind(FrozenPolicy).values())])


def rank_in(policy: FrozenPolicy) -> int:
    """The rank of the adapter a frozen policy is; 0: it is none.

    Raises:
        InputError: an adapter without its configuration.
    """
    directory = Path(policy.path)
    if not policy.path or not (directory / "adapter_model.safetensors").is_file():
        return 0
    rank = _adapter_config(directory).get("r")
    if not isinstance(rank, int) or rank < 1:
        raise InputError(
            f"{directory / 'adapter_config.json'}: not the configuration of a LoRA adapter (r is {rank!r})"
        )
    return rank


def _adapter_config(directory: Path) -> dict[str, Any]:
    file = directory / "adapter_config.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{file}: not the configuration of a LoRA adapter ({error!r})") from error
    if not isinstance(content, dict):
        raise InputError(f"{file}: not the configuration of a LoRA adapter")
    return content


def _is_same_model(one: Path, other: Path) -> bool:
    """Whether two directories hold the same weights; where one is not here, whether they are called the same."""
    if not one.is_dir() or not other.is_dir():
        return one.name == other.name
    if one.samefile(other):
        return True
    files = [{file.name: file for file in path.glob("*.safetensors")} for path in (one, other)]
    sizes = [{name: file.stat().st_size for name, file in found.items()} for found in files]
    return sizes[0] == sizes[1] and all(sha256_of(files[0][name]) == sha256_of(files[1][name]) for name in files[0])
