"""The policies of a run: their seats, their sampling settings, and their given weights.

An environment declares its children in `fan_out`, by class name: `{"Solve": 8}`. The class is looked up in the
environment's own module. Their seats are bound as `Solve.solver`, else by the bare name.
"""

from __future__ import annotations

import asyncio
import difflib
import json
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from agentrl.app.model_files import model_paths
from agentrl.config.combinations import (
    ADAPTERS,
    BRANCHES,
    CAPTURED_FILTERS,
    CAPTURED_ROUTING,
    REFRESHES,
    running_engine_part,
)
from agentrl.config.fields import base_model_display_name
from agentrl.config.plans import BaseModelPlan, EnginePlan, RolloutPlan, SeatAssignment
from agentrl.config.policies import AnyPolicy, FrozenPolicy, OpponentPoolPolicy, PolicyConfig
from agentrl.config.run import RunConfig
from agentrl.config.sections import ModelConfig, SamplingConfig
from agentrl.core import machine
from agentrl.core.errors import ConfigError, EngineError, InputError
from agentrl.core.files import WEIGHT_FILES, expand_path, read_json, read_whole, sha256_of
from agentrl.core.model_layers import config_parts
from agentrl.core.parts import Part, check_compatible
from agentrl.core.ports import ChatFormat, EngineCapabilities
from agentrl.core.quantization import check_quantization
from agentrl.core.records import PolicyVersion, WeightsRef
from agentrl.core.text import plural
from agentrl.environment.environment import Environment, child_environments
from agentrl.environment.harness import HarnessEnvironment
from agentrl.environment.mixture import root_environments
from agentrl.environment.tools import ToolEnvironment
from agentrl.journal.entries import SeatSettings
from agentrl.orchestrator.scheduler import GroupDemand
from agentrl.orchestrator.versions import ServedVersions, record_published_version
from agentrl.rollout.chat.byte_formats import JsonChatFormat
from agentrl.rollout.episode import PolicySettings, RolloutSettings
from agentrl.rollout.episode_context import MAX_CHILD_DEPTH

if TYPE_CHECKING:
    from agentrl.journal.port import JournalStore

MAX_EXTERNAL_CONTEXT = 1 << 20
"""Longest conversation, in bytes, with an external policy; its endpoint bounds the tokens."""
_WITHOUT_TORCHVISION = {"gemma3n"}
"""Types of checkpoints for images and text whose class in vLLM does not import torchvision."""
_WITH_TORCHVISION = {"qwen3_5_text", "qwen3_5_moe_text"}
"""Types of text models whose class in vLLM is in one module with that for images."""
_GATED_DELTA_NET = {"qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"}
"""Types of text models whose recurrent layers vLLM computes on CPUs in bfloat16 alone."""
SPARE = 1
"""Number of adapter slots beyond those in use: a new adapter is loaded before an old one is unloaded."""


# --- seats ------------------------------------------------------------------------------------------------------------


def pinned_policy_step_lags(trained: Mapping[str, PolicyConfig], *, deterministic: bool) -> dict[str, int]:
    """Return the policies whose episodes are pinned to versions (adapters of a deterministic run, several versions of
    which are served at once), with the number of steps by which the oldest of them is behind the current one."""
    policies = trained.items() if deterministic else ()
    return {name: policy.largest_staleness for name, policy in policies if policy.served_adapter is not None}


class EpisodeKindSeats(NamedTuple):
    """The seats of a root episode, or of a kind of child episode (named `Env.seat`)."""

    seats: tuple[str, ...]
    times: int
    """Number of episodes of the kind per root episode."""


def seats_by_episode_kind(
    environment: type[Environment], prefix: str = "", times: int = 1, depth: int = 0
) -> Iterator[EpisodeKindSeats]:
    """Yield the seats of a root episode, and of each kind of child episode it declares."""
    yield EpisodeKindSeats(tuple(f"{prefix}{seat}" for seat in environment.seats), times)
    for child, number in child_environments(environment).items():
        if depth < MAX_CHILD_DEPTH:
            yield from seats_by_episode_kind(child, f"{child.__name__}.", times * number, depth + 1)


def group_demands(
    kinds: Sequence[EpisodeKindSeats], assignment: SeatAssignment, size: int, branches: int, trained: Collection[str]
) -> list[GroupDemand]:
    """Return the units of each policy that learns in a group of one environment, for each line-up.

    Args:
        kinds: seats of the root episodes and their children.
        assignment: policies of the seats.
        size: root episodes of the group.
        branches: branches that each of them may start.
        trained: policies that learn.
    """
    demands = []
    for group in range(assignment.line_ups):
        units: Counter[str] = Counter()
        for kind in kinds:
            holders = {assignment.policy_of(seat, group) for seat in kind.seats}
            units.update({name: kind.times * size * (1 + branches) for name in holders if name in trained})
        demands.append(GroupDemand(episodes=size, units=dict(units)))
    return demands


def split_group_warnings(
    trained: Mapping[str, PolicyConfig], release: str, demands: Sequence[GroupDemand]
) -> Iterator[str]:
    """Yield a warning for each policy whose steps end inside groups: this works, but is rarely intended.

    Args:
        trained: policies that learn.
        release: `credit.release`.
        demands: units of a group, for each line-up.
    """
    for name, policy in trained.items():
        brought = {demand.units[name] for demand in demands if demand.units.get(name)}
        if release == "group" and any(policy.step_size % units for units in brought):
            units = max(brought)
            whole_group_size = max(round(policy.step_size / units), 1) * units
            yield (
                f"policies.{name}.step_size = {policy.step_size} is not a multiple of the {plural(units, 'unit')} that "
                "a group produces, so steps end inside groups: the rest of a group is trained one step later, with "
                f"the same advantages. Set step_size = {whole_group_size} for whole groups"
            )


def check_fill(size: int, name: str, policy: PolicyConfig, brought: Sequence[int]) -> None:
    """Check that groups fit the bounds of a policy and, at staleness 0, fill its steps with whole groups."""
    largest, smallest = max(brought), min(brought)
    bound = (1 + policy.largest_staleness) * policy.step_size
    if largest > bound:
        raise ConfigError(
            f"credit.group_size = {size}: a group produces {plural(largest, 'unit')} of {name}, more than may be in "
            f"flight: (1 + max_staleness) × step_size = {bound}; raise policies.{name}.step_size to {largest} or more, "
            "or lower credit.group_size, the fan-out or the branches"
        )
    if policy.largest_staleness == 0 and smallest == largest and policy.step_size % largest:
        full = policy.step_size - policy.step_size % largest
        raise ConfigError(
            f"policies.{name}.step_size = {policy.step_size} can never be filled: a group produces "
            f"{plural(largest, 'unit')} of {name}, and with max_staleness = 0 only whole groups that fit are admitted, "
            f"so every step would have {full}. Set step_size = {full} or {full + largest}, or max_staleness = 1"
        )


def check_tree_declarations(root: type[Environment]) -> None:
    """Refuse branches where episodes cannot have them.

    Raises:
        ConfigError: the message names the declaration.
    """
    children = [child for child, _ in _descendants(root)]
    for environment in [root, *children]:
        if environment.branches < 0:
            raise ConfigError(f"{environment.__name__}.branches is {environment.branches}; it must not be negative")
    if any(child.branches for child in children):
        raise ConfigError(
            f"{root.__name__} spawns episodes with branches, and only episodes that a group starts with may branch: "
            "set branches = 0 in the child environment"
        )


def tree_parts(root: type[Environment]) -> Iterator[Part]:
    """Yield the declarations of an environment that other parts of a run must fit."""
    if root.branches:
        yield BRANCHES._replace(setting=f"{root.__name__}.branches = {root.branches}")


def _descendants(environment: type[Environment], depth: int = 0) -> Iterator[tuple[type[Environment], int]]:
    """Yield the environments of child episodes, with their depth."""
    for child in child_environments(environment) if depth < MAX_CHILD_DEPTH else ():
        yield child, depth + 1
        yield from _descendants(child, depth + 1)


def lease_limits(trained: Mapping[str, PolicyConfig]) -> dict[str, int]:
    """Return the number of versions of each policy that trees may lease at once; `adapter_slots_needed` has room for
    them, the current version and the next."""
    return {name: policy.largest_staleness + 1 for name, policy in trained.items()}


def check_held(
    policies: Mapping[str, AnyPolicy], assignment: SeatAssignment, environment: type[Environment], seats: Sequence[str]
) -> None:
    """Check that every policy holds a seat, and that at least one learns."""
    holders = assignment.policies_of(seats)
    for name in assignment.policies:
        if name not in holders:
            raise ConfigError(
                f"policies.{name} holds no seat of {environment.__name__} ({', '.join(seats)}): bind it in [seats], "
                "declare in fan_out the child environment that seats it, or remove the policy"
            )
    if not any(isinstance(policy, PolicyConfig) for policy in policies.values()):
        raise ConfigError(
            f"no seat of {environment.__name__} is held by a trained policy, so no policy would learn: bind a "
            "policy with kind = 'trained' to one"
        )


def check_engine_capabilities(plan: EnginePlan, capabilities: EngineCapabilities) -> None:
    """Check that the engine has the capabilities that the run needs.

    Raises:
        ConfigError: the engine lacks one; the message names the setting and the engine.
    """
    policies = {name: policy for base in plan.bases for name, policy in base.policies.items()}
    adapters = adapter_slots_needed(policies)
    refreshes = {plan.refresh[name] for base in plan.bases for name in base.trained}
    parts = [REFRESHES[refresh] for refresh in sorted(refreshes)]
    parts += [CAPTURED_ROUTING] * plan.engine.capture_routing + [CAPTURED_FILTERS] * bool(plan.filtered)
    parts.append(ADAPTERS._replace(setting=f"{adapters} {ADAPTERS.setting}"))
    check_compatible([*parts, running_engine_part(capabilities, adapters)])


def check_names(seats: Iterable[str], environment: type[Environment], known_names: Sequence[str]) -> None:
    """Check the names in `[seats]`: a misspelled seat would silently be held by another policy."""
    names = {*known_names, *(seat.rsplit(".", 1)[-1] for seat in known_names)}
    for seat in seats:
        if seat not in names:
            suggestions = difflib.get_close_matches(seat, sorted(names), n=1)
            hint = f"did you mean {suggestions[0]!r}?" if suggestions else f"its seats: {', '.join(sorted(names))}"
            raise ConfigError(f"seats.{seat}: {environment.__name__} has no such seat; {hint}")


# --- settings ---------------------------------------------------------------------------------------------------------


def rollout_settings(plan: RolloutPlan, chat_format: ChatFormat, max_context: int) -> RolloutSettings:
    """Make the settings of a worker's episodes, with an engine whose contexts hold `max_context` tokens; without
    scorers.
    """
    return RolloutSettings(
        seat=seat_settings(plan.sampling, max_context),
        policies=policy_overrides(plan, chat_format, max_context),
        episode_timeout_s=plan.episode_timeout_s,
        max_staleness={name: policy.largest_staleness for name, policy in plan.trained.items()},
        reward_weights=plan.credit.reward_weights,
        compares_turns=plan.credit.compares_turns,
        scored=plan.scored,
        gateway_sampling=plan.gateway.sampling,
        evaluation_sampling=dict.fromkeys(plan.trained, plan.evaluation_sampling.changes),
    )


def policy_overrides(plan: RolloutPlan, chat_format: ChatFormat, max_context: int) -> Mapping[str, PolicySettings]:
    """Return the settings of the policies that override `[sampling]` or the chat format of `model.path`, by policy."""
    formats = base_model_chat_formats(plan.model, plan.bases)
    overrides = {}
    for name, sampling in plan.sampling_by_policy.items():
        if name in plan.external:
            seat = seat_settings(sampling, MAX_EXTERNAL_CONTEXT)
            overrides[name] = PolicySettings(chat_format=JsonChatFormat(), seat=seat, is_external=True)
        elif name in formats or sampling != plan.sampling:
            seat = seat_settings(sampling, max_context)
            overrides[name] = PolicySettings(chat_format=formats.get(name, chat_format), seat=seat)
    return overrides


def base_model_chat_formats(model: ModelConfig, bases: Iterable[BaseModelPlan]) -> dict[str, ChatFormat]:
    """Make the chat formats of the policies whose base model differs from `model.path`.

    Raises:
        ModelError: a base model's tokenizer or template cannot be used.
    """
    main = os.path.realpath(model.path) if model.path else ""
    other_bases = [base for base in bases if base.path != main]
    if not other_bases:
        return {}
    from agentrl.rollout.chat.chat_format import TemplateChatFormat

    load = partial(
        TemplateChatFormat.load,
        history=model.history,
        tools_in=model.tools_in,
        template_variables=model.template_variables,
    )
    return {name: chat_format for base in other_bases for chat_format in [load(base.path)] for name in base.policies}


def chat_formats(plan: RolloutPlan, chat_format: ChatFormat) -> dict[str, ChatFormat]:
    """Return the chat format of each policy that an engine serves; `chat_format` is that of `model.path`."""
    formats = base_model_chat_formats(plan.model, plan.bases)
    return {name: formats.get(name, chat_format) for name in plan.policies if name not in plan.external}


def environments_with_tools(environment: type[Environment]) -> list[str]:
    """Return the names of the environments, of a mixture for example, that may offer tools from their first turn."""
    members = root_environments(environment)
    return [member.__name__ for member in members if issubclass(member, ToolEnvironment | HarnessEnvironment)]


def hidden_tools(plan: RolloutPlan, environment: type[Environment], chat_format: ChatFormat) -> str:
    """Return a warning if a chat template hides the environment's tools from a policy; empty if none does.

    Args:
        plan: the workers' part of the run.
        environment: its environment; the tools of environments that are not a `ToolEnvironment` or a
            `HarnessEnvironment` are known only once an episode runs.
        chat_format: the chat format of `model.path`.
    """
    with_tools = environments_with_tools(environment)
    policies = [name for name, own_format in chat_formats(plan, chat_format).items() if not own_format.shows_tools]
    if not with_tools or not policies:
        return ""
    return hidden_tools_line(policies, f"the tools of {' and '.join(with_tools)}")


def hidden_tools_line(policies: Sequence[str], tools: str) -> str:
    """Return the warning that chat templates of policies ignore tools."""
    return (
        f"the chat template of {' and '.join(policies)} ignores tools, so the model never sees {tools}. Set "
        "model.tools_in = 'system' to list them in the system message"
    )


def check_quantized_models(config: RunConfig) -> None:
    """Refuse quantized checkpoints, except those that vLLM serves to policies that do not learn.

    Raises:
        ModelError: the message names the directory and the method.
    """
    on_vllm = config.engine.kind == "vllm"
    frozen = {base.path for base in config.bases if on_vllm and not base.trained}
    for path in dict.fromkeys(model_paths(config).values()):
        if os.path.realpath(path) not in frozen:
            check_quantization(Path(path))


def check_vllm_models(plan: EnginePlan) -> None:
    """Refuse base models that vLLM cannot serve on this machine: for images and text without torchvision, adapters in
    float32 on a GPU, whose kernels for them compute in 16 bits alone, and Gated DeltaNet in float32 without one.

    Raises:
        ConfigError: the message names the model and the remedy.
        ModelError: a directory holds no model.
    """
    on_gpu = bool(machine.gpus())
    if plan.engine.kind != "vllm" or (plan.demand.cluster.ray_address and not on_gpu):
        return
    from agentrl.engines.models import dtype_name, model_dtype

    embedded = "or engine.vllm = false for the embedded engine"
    for base in plan.bases:
        settings = read_json(Path(base.path) / "config.json")
        model_type = str(settings.get("model_type"))[:40]
        with_images = settings.get("vision_config") and model_type not in _WITHOUT_TORCHVISION
        if (with_images or model_type in _WITH_TORCHVISION) and (why := machine.missing_torchvision()):
            raise ConfigError(
                f"vLLM imports torchvision for {base.path} ({model_type}), even if it serves text alone, but {why}, "
                f"{embedded}"
            )
        text_type = str(config_parts(settings)[-1].get("model_type"))[:40]
        what, where = "", "on a GPU" if on_gpu else "without a GPU"
        if on_gpu and any(policy.lora is not None and not policy.lora.merge for policy in base.trained.values()):
            what = "serves adapters in 16 bits"
        elif not on_gpu and text_type in _GATED_DELTA_NET:
            what = f"computes the Gated DeltaNet of {text_type} in bfloat16"
        if what and dtype_name(model_dtype(base.path, plan.dtype, "cpu")) == "float32":
            raise ConfigError(
                f"{where} vLLM {what} only, and {base.path} computes in float32: set "
                f'model.dtype = "bfloat16", {embedded}'
            )


def check_expert_adapters(bases: Iterable[BaseModelPlan], *, is_vllm_on_cpu: bool) -> None:
    """Refuse adapters on a mixture of experts where the engine cannot serve them.

    A model that is not downloaded yet is checked once it is.

    Args:
        bases: the base models.
        is_vllm_on_cpu: whether the engines are vLLM without a GPU.

    Raises:
        ConfigError: a policy has one; the message has the reason.
        ModelError: a config.json cannot be read.
    """
    for name, policy, path in (
        (name, policy, Path(base.path)) for base in bases for name, policy in base.trained.items()
    ):
        if policy.lora is None or policy.lora.merge or not is_vllm_on_cpu:
            continue
        key, settings = f"policies.{name}.lora", read_json(path / "config.json")
        numbers = {each: n for part in config_parts(settings) for each, n in part.items()}.items()
        # Dense models may have these settings too, as null, 0 or 1.
        has_experts = any("expert" in each and isinstance(n, int | list) and n not in (0, 1) for each, n in numbers)
        if has_experts:
            raise ConfigError(
                f"{key}: without a GPU vLLM serves no adapters of a mixture of experts, on whichever layers. Set "
                f"engine.vllm = false for the embedded engine, or {key}.merge = true"
            )


def check_tokenizers(plan: EnginePlan) -> None:
    """Refuse models that get a policy's token ids and have another tokenizer, before weights are loaded: references,
    weights of frozen policies, and draft models.

    Raises:
        ConfigError: two tokenizers differ; the message has the first token with different ids.
        InputError: a reference has no directory, no weights or another base model, or a tokenizer cannot be read.
    """
    for base in plan.bases:
        for name, policy in base.policies.items():
            if isinstance(policy, PolicyConfig) and policy.reference:
                reference = Path(policy.reference)
                if not reference.is_dir():
                    raise InputError(f"policies.{name}.reference: there is no directory {reference}")
                if not any(reference.glob("*.safetensors")):
                    raise InputError(
                        f"policies.{name}.reference: {reference} has no weights (no *.safetensors); give the "
                        "directory of a model, or of an adapter such as another run's policies/NAME"
                    )
                why = "a reference scores the policy's own tokens"
                _check_tokenizer(f"policies.{name}.reference", reference, base.path, why)
            elif isinstance(policy, FrozenPolicy) and policy.path:
                why = "the policy's conversations are written with the tokenizer of its base model"
                _check_tokenizer(f"policies.{name}.path", Path(policy.path), base.path, why)
        draft = (plan.engine.vllm or {}).get("speculative_config")
        if isinstance(draft, Mapping) and isinstance(path := draft.get("model"), str):
            why = "a draft model proposes the policy's tokens"
            _check_tokenizer("engine.vllm.speculative_config.model", Path(path), base.path, why)


def _check_tokenizer(setting: str, directory: Path, base: str, why: str) -> None:
    """Refuse a directory with another tokenizer than a base model; published weights have none of their own."""
    file = directory / "tokenizer.json"
    if not file.is_file():
        return
    tokens, base_tokens = _numbered_tokens(file), _numbered_tokens(Path(base) / "tokenizer.json")
    unequal = [token for token in {**tokens, **base_tokens} if base_tokens.get(token) != tokens.get(token)]
    different = min(unequal, key=lambda token: base_tokens.get(token, len(base_tokens)), default=None)
    if different is not None:
        raise ConfigError(
            f"{setting}: {directory} has another tokenizer than {base} (token {different!r} is "
            f"{tokens.get(different, 'missing')} there and {base_tokens.get(different, 'missing')} here), and {why}: "
            "choose a model of the same family"
        )


def _numbered_tokens(file: Path) -> Mapping[str, int]:
    from agentrl.rollout.chat.chat_format import read_tokenizer

    numbers: dict[str, int] = read_tokenizer(file).get_vocab(with_added_tokens=True)
    return numbers


def seat_settings(sampling: SamplingConfig, max_context: int) -> SeatSettings:
    """Make the settings of a seat from a sampling section, for conversations of up to `max_context` tokens."""
    return SeatSettings(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        max_tokens=sampling.max_tokens,
        max_turns=sampling.max_turns,
        max_context=max_context,
    )


# --- weights ----------------------------------------------------------------------------------------------------------


class BaseModelRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A base model of a run, in the form of the run's journal."""

    name: str
    """Name of the model: the last two parts of its directory."""
    path: str
    """Directory of the model."""
    policies: tuple[str, ...]
    """Policies that are served on the model: their versions are its adapters, or full weights."""


def base_models(bases: Iterable[BaseModelPlan]) -> list[BaseModelRecord]:
    """Return the base models of a run."""
    policies: dict[str, list[str]] = {}
    for base in bases:
        policies.setdefault(base.path, []).extend(base.policies)
    return [
        BaseModelRecord(name=base_model_display_name(path), path=path, policies=tuple(names))
        for path, names in policies.items()
    ]


def weights_from_directory(policy: str, directory: str | Path) -> WeightsRef:
    """Return the trained weights of a policy in a directory, such as a run's `policies/NAME`.

    Raises:
        InputError: the directory has no weights.
    """
    # Resolved, because `policies/NAME` is a link whose target changes with each version.
    directory = Path(expand_path(directory)).resolve()
    kinds: tuple[Literal["full", "adapter"], ...] = ("full", "adapter")
    for kind in kinds:
        if (directory / WEIGHT_FILES[kind][0]).is_file():
            try:
                digest = sha256_of(*(directory / name for name in WEIGHT_FILES[kind]))
            except OSError as error:
                raise InputError(f"{error.filename}: cannot be read ({error.strerror})") from error
            # Lineage -1 marks weights from a user; their step comes from their digest. No run publishes such versions,
            # so tokens recorded with them are never mistaken for a run's.
            version = PolicyVersion(policy, -1, 1 + int(digest[:8], 16))
            return WeightsRef(version=version, path=str(directory), kind=kind, sha256=digest)
    names = " nor ".join(WEIGHT_FILES[kind][0] for kind in kinds)
    problem = f"contains no weights (neither {names})" if directory.is_dir() else "there is no such directory"
    raise InputError(
        f"{directory}: {problem}; give a run's policies/NAME. Another base model is given "
        "by model.path, or policies.NAME.model"
    )


def frozen_policy_weights(bases: Iterable[BaseModelPlan]) -> list[WeightsRef]:
    """Return the weights of the frozen policies that differ from their base model.

    Raises:
        InputError: a policy's directory has no weights, or an adapter of another base model.
    """
    frozen_weights = []
    for base in bases:
        for name, policy in base.policies.items():
            if isinstance(policy, FrozenPolicy) and policy.path:
                weights = weights_from_directory(name, policy.path)
                if weights.kind == "adapter":
                    check_adapter_base(weights, Path(base.path))
                frozen_weights.append(weights)
    return frozen_weights


def check_adapter_base(weights: WeightsRef, base: Path) -> None:
    """Refuse an adapter whose configuration names another base model than `base`.

    Raises:
        InputError: the models differ; the message names the policy, the adapter, and both models.
    """
    base_name = _adapter_config(Path(weights.path)).get("base_model_name_or_path")
    if not isinstance(base_name, str) or not base_name:
        return  # the adapter does not name its base; the engine still compares shapes
    if not _is_same_model(Path(base_name), base):
        raise InputError(
            f"policies.{weights.version.policy}.path: {weights.path} is an adapter of a different base model, "
            f"{base_name}, and the policy's base model is {base}; give an adapter of that base, or correct "
            "base_model_name_or_path in its adapter_config.json if the model was only moved"
        )


async def serve_configured_weights(
    bases: Iterable[BaseModelPlan],
    served_versions: ServedVersions,
    store: JournalStore,
    frozen_weights: Sequence[WeightsRef],
) -> None:
    """Load weights into an engine in place of the base model's, and record their location in the journal.

    Raises:
        InputError: the weights do not fit the base model, or are gone.
    """
    for weights in frozen_weights:
        await record_published_version(store, weights)
        try:
            await served_versions.make_current(weights)
        except EngineError as error:
            if not await asyncio.to_thread(Path(weights.path).is_dir):
                raise InputError(
                    f"the weights of {weights.version}, {weights.path}, are gone: they were pruned meanwhile. "
                    "checkpoint.versions = 0 keeps all versions"
                ) from error
            base = next(base.path for base in bases if weights.version.policy in base.policies)
            raise InputError(f"{weights.path} does not fit {base}: {error}") from error


def adapter_slots_needed(policies: Mapping[str, AnyPolicy]) -> int:
    """Return the number of adapters that an engine of these policies must be able to serve at once."""
    slots = 0
    for policy in policies.values():
        match policy:
            case PolicyConfig() if policy.served_adapter is not None:
                slots += policy.largest_staleness + 2
            case FrozenPolicy():
                slots += adapter_rank(policy) > 0
            case OpponentPoolPolicy():
                learner = policies[policy.of]
                if isinstance(learner, PolicyConfig) and learner.served_adapter is not None:
                    slots += policy.size + SPARE  # a removed opponent keeps its slot until its episodes have ended
    return slots + SPARE if slots else 0


def serves_only_adapters(policies: Mapping[str, AnyPolicy]) -> bool:
    """Whether an engine of these policies never changes the weights of their base model, because adapters are served
    on it or merged into a copy, and one of them learns."""
    for policy in policies.values():
        player = policies[policy.of] if isinstance(policy, OpponentPoolPolicy) else policy
        if isinstance(player, PolicyConfig) and player.lora is None:
            return False
        if isinstance(player, FrozenPolicy) and player.path and not adapter_rank(player):
            return False
    return any(isinstance(policy, PolicyConfig) for policy in policies.values())


def merged_policies(base: BaseModelPlan) -> list[str]:
    """Return the policies of a base model whose adapters its engines merge."""
    return [name for name, policy in base.trained.items() if policy.lora is not None and policy.lora.merge]


def largest_lora_rank(policies: Iterable[AnyPolicy]) -> int:
    """Return the largest rank of a served adapter; at least 1."""
    ranks = [1]
    for policy in policies:
        if isinstance(policy, PolicyConfig) and policy.served_adapter is not None:
            ranks.append(policy.served_adapter.rank)
        elif isinstance(policy, FrozenPolicy):
            ranks.append(adapter_rank(policy))
    return max(ranks)


def _has_adapter(policy: FrozenPolicy) -> bool:
    return bool(policy.path) and (Path(policy.path) / "adapter_model.safetensors").is_file()


def adapter_rank(policy: FrozenPolicy) -> int:
    """Return the rank of a frozen policy's adapter; 0 if it has none.

    Raises:
        InputError: the adapter lacks its configuration.
    """
    directory = Path(policy.path)
    if not _has_adapter(policy):
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
        content = json.loads(read_whole(file))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{file}: not the configuration of a LoRA adapter ({error!r})") from error
    if not isinstance(content, dict):
        raise InputError(f"{file}: not the configuration of a LoRA adapter")
    return content


def _is_same_model(one: Path, other: Path) -> bool:
    """Whether two directories hold the same weights; if one is missing or a name on the hub, whether they have the same
    name."""
    if not one.is_dir() or not other.is_dir():
        names = {Path(base_model_display_name(str(path))).name for path in (one, other)}
        return len(names) == 1
    if one.samefile(other):
        return True
    files = [{file.name: file for file in path.glob("*.safetensors")} for path in (one, other)]
    sizes = [{name: file.stat().st_size for name, file in by_name.items()} for by_name in files]
    return sizes[0] == sizes[1] and all(sha256_of(files[0][name]) == sha256_of(files[1][name]) for name in files[0])
