"""The parts of a run that must fit each other, besides its algorithms: what each gives and needs.

`config.run.run_parts` lists the parts of a configuration in the order in which conflicts are reported, and
`core.parts.compatible` finds the conflicts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from agentrl.config.algorithms import (
    ADVANTAGES,
    DYNAMIC_SAMPLING,
    LOSSES,
    NEEDS_REFERENCE,
    ONE_MEMBER,
    RELEASES,
    TO_GO,
    advantage_part,
    loss_part,
    normalizer_part,
)
from agentrl.config.policies import PolicyConfig
from agentrl.core.custom_functions import FunctionDeclaration
from agentrl.core.parts import Need, Part, Property

if TYPE_CHECKING:
    from agentrl.config.scorers import ScorerConfig
    from agentrl.config.sections import CreditConfig, LossConfig
    from agentrl.core.ports import EngineCapabilities, Refresh


# --- policies ---------------------------------------------------------------------------------------------------------

FULL_WEIGHTS = Part("weights", "full weights of policies.NAME", "set policies.NAME.lora")
MERGED_ADAPTER = Part("weights", "policies.NAME.lora.merge = true", "set policies.NAME.lora.merge = false")
ADAPTER = Part(
    "weights",
    "policies.NAME.lora",
    gives=frozenset({Property.SEVERAL_VERSIONS, Property.STABLE_VERSION, Property.KEEPS_VERSIONS}),
)
SYNCHRONOUS = Part(
    "staleness",
    "policies.NAME.max_staleness = 0",
    "set policies.NAME.max_staleness = 1 or more",
    gives=frozenset({Property.REPEATABLE}),
)
MEASURED_STALENESS = Part(
    "staleness",
    "policies.NAME.max_staleness = 'auto'",
    "set policies.NAME.max_staleness = 1, or 0 with full weights",
    gives=frozenset({Property.OVERLAPS}),
)
MASKED_LAG = Part(
    "bound on lag",
    "policies.NAME.max_lag",
    "remove policies.NAME.max_lag",
    needs=(
        Need(
            "loss",
            Property.BY_TOKEN,
            "it weighs a token by others, of which only the newer ones are left; even a turn can span versions",
            "set a loss that groups by token (docs/reference/algorithms.md), such as 'truncated', or remove "
            "policies.NAME.max_lag",
        ),
        Need(
            "normalizer",
            Property.WITHIN_TURN,
            "the tokens that are left of a conversation would weigh more",
        ),
    ),
)
WITHOUT_REFERENCE = Part("reference", "policies.NAME without a reference", "set policies.NAME.reference")
KL = Part("divergence", "trainer.loss.kl above 0", "set trainer.loss.kl = 0", needs=(NEEDS_REFERENCE,))
SEVERAL_LEARNERS = Part("learners", "several trained policies", "bind the seats to one trained policy")
PAST_POLICY = Part("policy", "policies.NAME.kind = 'past'", "remove policies.NAME")
REMOTE_POLICY = Part(
    "policy",
    "policies.NAME.kind = 'remote'",
    "remove policies.NAME",
    gives=frozenset({Property.KEEPS_VERSIONS}),
    needs=(
        Need(
            "sampling",
            Property.API_SAMPLING,
            "the chat completions API has neither top_k nor min_p",
            "set both to 0 in policies.NAME.sampling",
        ),
    ),
)
FILTERED_ENDPOINT = Part("sampling", "top_k or min_p of policies.NAME", "set both to 0 in policies.NAME.sampling")
MIXED_FILTERS = Part("filters", "top_k, top_p or min_p for some policies only")

# --- engines ----------------------------------------------------------------------------------------------------------

_EMBEDDED = "set engine.vllm = false for the embedded engine"
VLLM = Part(
    "engine",
    "engine.vllm",
    _EMBEDDED,
    needs=(
        Need(
            "filters",
            Property.SAME_FILTERS,
            "vLLM returns the kept set of every token once any policy has top_k, top_p or min_p, and without a filter "
            "that is the whole vocabulary",
            f"set a filter for all policies or for none, or {_EMBEDDED}",
        ),
        Need(
            "policy",
            Property.KEEPS_VERSIONS,
            "vLLM serves one version of full weights, and policies.NAME plays earlier ones",
            f"train an adapter (policies.*.lora, without merge) instead of full weights, or {_EMBEDDED}",
        ),
    ),
)
EVALUATION = Part(
    "evaluation",
    "evaluation.every above 0",
    "set evaluation.every = 0",
    needs=(
        Need(
            "weights",
            Property.KEEPS_VERSIONS,
            "an evaluation keeps a version while newer ones serve, but vLLM holds one version of full weights",
        ),
    ),
)
NO_HELD_OUT_TASKS = Part("held-out tasks", "evaluation.tasks = 0", "set evaluation.tasks and evaluation.every")
BEST_EVALUATION = Part(
    "best metric",
    "best.metric = 'evaluation/reward'",
    "set another best.metric",
    needs=(Need("held-out tasks", Property.MEASURED, "no evaluation would measure it"),),
)
REPLICAS = Part("replicas", "engine.replicas above 1", "set engine.replicas = 0 or 1")
_NEWER_VERSIONS = Need("weights", Property.SEVERAL_VERSIONS, "an engine holds one version of full weights")


def _refresh(mode: str, capability: Property, *needs: Need) -> Part:
    supported = Need("running engine", capability, "this engine does not support it", "choose another engine.refresh")
    return Part(
        "refresh",
        f"engine.refresh = {mode!r}",
        "set engine.refresh = 'auto', 'token' or 'turn'",
        needs=(*needs, supported),
    )


REFRESHES: dict[str, Part] = {
    "token": _refresh("token", Property.REFRESH_TOKEN),
    "token_keep_kv": Part(
        "refresh",
        "engine.refresh = 'token_keep_kv'",
        needs=(
            Need(
                "engine",
                Property.KEEPS_KV,
                "vLLM never reuses the KV cache of one adapter for another, so a turn that continues under a newer "
                "adapter is recomputed",
                "set engine.refresh = 'token'",
            ),
        ),
    ),
    "turn": _refresh("turn", Property.REFRESH_TURN),
    "episode": _refresh("episode", Property.REFRESH_EPISODE, _NEWER_VERSIONS),
    "lazy": _refresh("lazy", Property.REFRESH_LAZY, _NEWER_VERSIONS),
}
_REFRESH_CAPABILITIES: dict[Refresh, Property] = {
    "token": Property.REFRESH_TOKEN,
    "turn": Property.REFRESH_TURN,
    "episode": Property.REFRESH_EPISODE,
    "lazy": Property.REFRESH_LAZY,
}
CAPTURED_ROUTING = Part(
    "engine feature",
    "engine.capture_routing = true",
    "set engine.capture_routing = false",
    needs=(Need("running engine", Property.EXPERT_ROUTING, "this engine does not record experts"),),
)
CAPTURED_FILTERS = Part(
    "engine feature",
    "sampling.top_k, top_p or min_p",
    "remove the filters",
    needs=(Need("running engine", Property.KEPT_SETS, "this engine does not record kept sets"),),
)
ADAPTERS = Part(
    "engine feature",
    "adapters at once (policies.*.lora, opponents, frozen ones)",
    "use fewer adapters",
    needs=(Need("running engine", Property.ADAPTER_SLOTS, "this engine has too few slots for adapters"),),
)


RUNNING_ENGINE = Part("running engine", "an engine without this feature")


def running_engine_part(capabilities: EngineCapabilities, adapters: int) -> Part:
    """Return the part of a running engine, which is to serve a number of adapters at once."""
    gives = {
        **{_REFRESH_CAPABILITIES[mode]: True for mode in capabilities.refresh},
        Property.EXPERT_ROUTING: capabilities.expert_routing,
        Property.KEPT_SETS: capabilities.sampling_mask,
        Property.ADAPTER_SLOTS: capabilities.adapters >= adapters,
    }
    return RUNNING_ENGINE._replace(
        setting=f"the engine {capabilities.name!r}", gives=frozenset(item for item, applies in gives.items() if applies)
    )


# --- scorers and the cluster ------------------------------------------------------------------------------------------

CLUSTER = Part("cluster", "cluster.address", "remove cluster.address")
GROUP_SCORER = Part(
    "scorer",
    "scorers.NAME.per = 'group'",
    "set scorers.NAME.per = 'episode'",
    needs=(
        Need(
            "release",
            Property.WHOLE_GROUPS,
            "it scores complete groups, and members are credited before their group is complete",
        ),
    ),
)
"""Judges, by the kind of their policy."""
# --- deterministic runs -----------------------------------------------------------------------------------------------

SCHEDULE = Part(
    "schedule",
    "freeze, max_in_flight = 'auto', steps as a table, best.stop_at, or seats.* as a list",
)
"""Settings under which batches depend on results or differ by policy."""
_CHANGES = "batches would depend on more than the run's configuration, or differ by policy"
DETERMINISTIC = Part(
    "determinism",
    "deterministic = true",
    "set deterministic = false",
    needs=(
        Need("release", Property.WHOLE_GROUPS, "who ends first depends on the machine"),
        Need(
            "weights",
            Property.STABLE_VERSION,
            "with max_staleness above 0, a batch would mix versions, since an engine holds one version of full weights",
            "set policies.NAME.max_staleness = 0, or train an adapter (policies.NAME.lora, without merge)",
        ),
        Need("staleness", Property.REPEATABLE, "'auto' chooses by the time that steps take"),
        Need("policy", Property.REPEATABLE, _CHANGES),
        Need("schedule", Property.REPEATABLE, _CHANGES, "remove one of the two"),
        Need("replicas", Property.REPEATABLE, "the composition of a batch must not vary"),
        Need("engine", Property.REPEATABLE, "with vLLM, a token depends on the rest of its batch"),
    ),
)

# --- environments with branches ---------------------------------------------------------------------------------------

BRANCHES = Part(
    "environment",
    "branches of an environment",
    "set branches = 0",
    needs=(
        Need(
            "advantage",
            Property.TREE_FORM,
            "this estimator has no form for trees",
            "set credit.advantage = 'leave_one_out' or 'none', or mark your function with "
            '@agentrl.advantage(over="tree")',
        ),
        Need("release", Property.WHOLE_GROUPS, "a tree is released whole"),
        Need("learners", Property.ONE_POLICY, "a tree stays on one version"),
        Need(
            "weights",
            Property.STABLE_VERSION,
            "with max_staleness above 0, full weights change while a tree runs, since an engine holds one version of "
            "them",
            "train an adapter (policies.NAME.lora, without merge), or set policies.NAME.max_staleness = 0",
        ),
        Need("scorer", Property.SCORES_EPISODES, "it would compare branches with whole episodes"),
        Need("cluster", Property.SHARED_FILES, "workers on other machines cannot read the turns before a branch"),
        Need(
            "loss",
            Property.WITHIN_TURN,
            "it weighs a token by others of its conversation or step, and a branch has only the end of a conversation",
            "set a loss that groups by token or turn (docs/reference/algorithms.md), such as 'truncated'",
        ),
        Need(
            "loss",
            Property.NO_DIVERGENCE,
            "a branch point would multiply the weight of the tokens behind it",
            "set a loss that learns from advantages, such as 'truncated'",
        ),
        Need("normalizer", Property.WITHIN_TURN, "a branch has only the end of a conversation"),
    ),
)

# --- the parts of sections --------------------------------------------------------------------------------------------


class Declarations(NamedTuple):
    """What the run's loss and advantage estimator declare.

    The default is for functions that are not loaded yet: they may declare whatever fits.
    """

    loss: FunctionDeclaration = FunctionDeclaration("loss", groups="token")
    advantage: FunctionDeclaration = FunctionDeclaration("advantage", over="tree")


UNLOADED = Declarations()


def credit_parts(credit: CreditConfig, loss: LossConfig, declarations: Declarations = UNLOADED) -> Iterator[Part]:
    """Yield the parts of losses and advantages.

    Raises:
        ConfigError: an option of the loss selects no grouping.
    """
    advantage = credit.advantage
    yield advantage_part(advantage.name, ADVANTAGES.get(advantage.name, declarations.advantage), advantage.options)
    yield loss_part(loss.name, LOSSES.get(loss.name, declarations.loss), loss.options)
    yield normalizer_part(loss.normalizer)
    if credit.turn_credit == "to_go":
        yield TO_GO
    if credit.dynamic_sampling:
        yield DYNAMIC_SAMPLING
    if credit.group_size == 1:
        yield ONE_MEMBER
    yield RELEASES[credit.release]


def learner_parts(loss: LossConfig, trained: Mapping[str, PolicyConfig]) -> Iterator[Part]:
    """Yield what a loss meets in the policies that learn: references, the divergence from them, and masked tokens."""
    if loss.kl:
        yield KL._replace(setting=f"trainer.loss.kl = {loss.kl}")
    for name, policy in trained.items():
        if not policy.reference:
            yield WITHOUT_REFERENCE.named(name, *([Property.FROZEN_REFERENCE] if policy.lora is not None else []))
        if policy.max_lag is not None:
            yield MASKED_LAG.named(name)


def scorer_parts(scorers: Mapping[str, ScorerConfig]) -> Iterator[Part]:
    for name, scorer in scorers.items():
        if scorer.per == "group":
            yield GROUP_SCORER.named(name)
