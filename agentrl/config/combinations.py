"""What sections of a `RunConfig` must agree on; each refusal names the keys and the mend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import ValidationError

from agentrl.config.policies import OutsidePolicy, PastPolicy, RemotePolicy
from agentrl.core.ids import is_safe_name

if TYPE_CHECKING:
    from agentrl.config.run import RunConfig


def check_together(config: RunConfig) -> None:
    """Refuse combinations that make no sense.

    Raises:
        ValueError: the keys, and the mend.
    """
    if not config.policies:
        raise ValueError("policies: at least one policy is needed")
    for key, name in (("name", config.name), *((f"policies.{name}", name) for name in config.policies)):
        if not is_safe_name(name):
            raise ValueError(f"{key}: {name!r} becomes part of a path: letters, digits, '.', '_' and '-' only")
    _check_model(config)
    _check_credit(config)
    _check_release(config)
    _check_seats(config)
    for name in config.policies:
        _check_sampling(config, name)
    for name, policy in config.trained.items():
        if policy.max_lag is not None and policy.max_lag < policy.max_staleness:
            raise ValueError(
                f"policies.{name}.max_lag = {policy.max_lag} is below max_staleness = {policy.max_staleness}, which "
                "bounds the mean of what max_lag limits: raise it, or lower max_staleness"
            )
    _check_freeze(config)
    _check_best(config)
    _check_full_weights(config)
    if config.deterministic:
        _check_deterministic(config)
    _check_engine(config)


def _check_model(config: RunConfig) -> None:
    here = [name for name, policy in config.policies.items() if not isinstance(policy, OutsidePolicy)]
    if here and not config.model.path:
        raise ValueError(
            f"model.path is needed for {', '.join(f'policies.{name}' for name in here)}: the directory of a local "
            "Hugging Face model, such as environments.calculator:model. Only remote endpoints and bots need none"
        )


def _check_credit(config: RunConfig) -> None:
    credit = config.credit
    if credit.turn_credit == "to_go" and credit.advantage == "role_mean":
        raise ValueError(
            "credit.turn_credit = 'to_go' compares the turns of a group: set credit.advantage = 'leave_one_out', "
            "or turn_credit = 'sum'"
        )
    if credit.group_size == 1 and credit.advantage not in ("role_mean", "none"):
        raise ValueError(
            f"credit.group_size = 1 with credit.advantage = {credit.advantage!r}: an episode with nothing to "
            "be compared with teaches nothing. Set group_size = 2 or more, or advantage = 'role_mean' or 'none'"
        )


def _check_release(config: RunConfig) -> None:
    """Members of a group that are trained before all have ended must not be credited by what is still running."""
    if config.credit.release == "group":
        return
    for what, reason in _not_with_release(config):
        raise ValueError(
            f"credit.release = {config.credit.release!r} cannot be with {what}: {reason}, or credit.release = 'group'"
        )


def _not_with_release(config: RunConfig) -> Iterator[tuple[str, str]]:
    """What cannot be with groups that are released in parts, with the reason and the mend."""
    credit = config.credit
    advantage = f"credit.advantage = {credit.advantage!r}"
    if credit.advantage == "group_std":
        why = "who ends first depends on what it does, so to divide by the spread of the first ones is biased"
        yield advantage, f"{why}. Set advantage = 'leave_one_out'"
    if credit.advantage == "group_mean":
        why = "a mean that counts the member itself differs for early and late ones, which is biased"
        yield advantage, f"{why}. Set advantage = 'leave_one_out'"
    if credit.turn_credit == "to_go":
        yield "credit.turn_credit = 'to_go'", "earlier groups are remembered as wholes. Set turn_credit = 'sum'"
    if config.deterministic:
        yield "deterministic = true", "who ends first depends on the machine. Leave one of the two out"
    if credit.release == "episode":
        return
    if credit.advantage in ("role_mean", "none"):
        yield advantage, "it compares nobody with its group, so nobody need be waited for. Set release = 'episode'"
    for name, policy in config.trained.items():
        if policy.max_staleness == 0:
            why = "each step then waits for all that runs, and nobody can be late"
            yield f"policies.{name}.max_staleness = 0", f"{why}. Set max_staleness = 1 or more"


def _check_seats(config: RunConfig) -> None:
    known = ", ".join(sorted(config.policies))
    for seat, held in config.seats.items():
        names = (held,) if isinstance(held, str) else held
        if not names:
            raise ValueError(f"seats.{seat}: the list is empty; name the policies that hold it, group by group")
        for name in names:
            if name not in config.policies:
                raise ValueError(f"seats.{seat}: no policy {name!r}; there are: {known}")
    trained = config.trained
    for name, past in config.of_kind(PastPolicy).items():
        if past.of not in trained:
            raise ValueError(
                f"policies.{name}.of: {past.of!r} is no policy that learns; there are: {', '.join(trained) or 'none'}"
            )


def _check_sampling(config: RunConfig, name: str) -> None:
    try:
        sampling = config.sampling_of(name)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        key = ".".join(map(str, detail["loc"]))
        said = f"no such setting of [sampling] (it has {', '.join(type(config.sampling).model_fields)})"
        raise ValueError(
            f"policies.{name}.sampling.{key}: {said if detail['type'] == 'extra_forbidden' else detail['msg']}"
        ) from None
    if isinstance(config.policies[name], RemotePolicy) and (sampling.top_k or sampling.min_p):
        raise ValueError(
            f"policies.{name}: chat completions know neither top_k nor min_p; set both to 0 in policies.{name}.sampling"
        )


def _check_freeze(config: RunConfig) -> None:
    """Every phase has somebody who learns, and everybody who is frozen has a phase to learn in."""
    phases = [{held} if isinstance(held, str) else set(held) for held, _ in config.freeze]
    named: set[str] = set().union(*phases)
    for number, frozen in enumerate(phases):
        for name in sorted(frozen - config.trained.keys()):
            known = ", ".join(config.trained) or "none"
            raise ValueError(f"freeze[{number}]: {name!r} is no policy that learns; there are: {known}")
        if frozen == named:
            raise ValueError(
                f"freeze[{number}]: nobody else is named in `freeze`, so nobody's steps could end this phase; name the "
                "policy that is to learn meanwhile in a phase of its own, or make this one kind = 'frozen' for good"
            )
    for name in sorted(named):
        if all(name in frozen for frozen in phases):
            raise ValueError(
                f"freeze: {name!r} is frozen in every phase; leave it out of one of them, or set "
                f"policies.{name}.kind = 'frozen'"
            )


def _check_best(config: RunConfig) -> None:
    best, trained = config.best, config.trained
    if not best.name and (best.stop_at is not None or best.stop_fall is not None):
        raise ValueError("best.stop_at and best.stop_fall end a run by a metric: set best.metric")
    if best.name and best.policy and best.policy not in trained:
        raise ValueError(
            f"best.policy: {best.policy!r} is no policy that learns; there are: {', '.join(trained) or 'none'}"
        )
    if best.name.startswith("evaluation/") and not config.evaluation.tasks:
        raise ValueError(f"best.metric = {best.metric!r} needs evaluations: set evaluation.tasks, and evaluation.every")


def _check_full_weights(config: RunConfig) -> None:
    for name, policy in config.trained.items():
        if policy.lora is None and config.engine.refresh in ("episode", "lazy"):
            raise ValueError(
                f"engine.refresh = {config.engine.refresh!r} needs adapters: an engine has one version of full "
                f"weights. Set policies.{name}.lora, or refresh = 'auto', 'token' or 'turn'"
            )
        if config.deterministic and policy.lora is None and policy.max_staleness:
            raise ValueError(
                f"deterministic = true with full weights needs policies.{name}.max_staleness = 0: an engine has "
                f"one version of them, and each wave is sampled by one. Set it, or policies.{name}.lora"
            )


def _check_deterministic(config: RunConfig) -> None:
    """What a run does must follow from its configuration alone, and waves are the same for all policies."""
    refused = {
        **{f"policies.{name}.kind = 'past'": True for name in config.of_kind(PastPolicy)},
        **{f"policies.{name}.kind = 'remote'": True for name in config.of_kind(RemotePolicy)},
        "freeze": bool(config.freeze),
        **{f"policies.{name}.steps": bool(policy.steps) for name, policy in config.trained.items()},
        "best.stop_at or best.stop_fall": config.best.stop_at is not None or config.best.stop_fall is not None,
        **{f"seats.{seat} as a list": isinstance(held, tuple) for seat, held in config.seats.items()},
    }
    for what, asked in refused.items():
        if asked:
            raise ValueError(f"deterministic = true cannot be with {what}: leave one of the two out")


def _check_engine(config: RunConfig) -> None:
    engine = config.engine
    if engine.kind == "vllm":
        _check_vllm(config)
    elif engine.placement == "here" and engine.replicas > 1:
        raise ValueError(
            "engine.replicas > 1 needs engines in processes of their own: set engine.placement = 'process', or 'ray'"
        )
    if engine.keep_kv and engine.kind == "vllm" and all(policy.lora for policy in config.trained.values()):
        raise ValueError(
            "engine.refresh = 'token_keep_kv': vLLM never serves keys and values of one adapter to another, so a turn "
            "that goes on under a newer one is computed again. Set engine.refresh = 'token'"
        )
    if engine.replicas > 1 and config.deterministic:
        raise ValueError("deterministic = true needs engine.replicas = 1: who shares a batch with whom must not vary")


def _check_vllm(config: RunConfig) -> None:
    full = [name for name, policy in config.trained.items() if policy.lora is None]
    here = [name for name, policy in config.policies.items() if not isinstance(policy, OutsidePolicy)]
    filtered = config.filtered
    refused = {
        "engine.capture_routing = true (vLLM does not return experts here)": config.engine.capture_routing,
        f"top_k, top_p or min_p for {', '.join(filtered)} (vLLM does not return what they keep)": filtered,
        "deterministic = true (in vLLM a token depends on who shares its batch)": config.deterministic,
    }
    if asked := [what for what, is_asked in refused.items() if is_asked]:
        raise ValueError(
            f"engine.kind = 'vllm' cannot be with {'; nor with '.join(asked)}: leave that off, or set "
            "engine.kind = 'embedded'"
        )
    if full and len(here) > 1:
        raise ValueError(
            "engine.kind = 'vllm' serves full weights of one policy alone: give a lora to policies "
            f"{', '.join(sorted(full))}, or set engine.kind = 'embedded'"
        )
    if full and config.evaluation.every:
        raise ValueError(
            "evaluation.every keeps a version while newer ones serve, and vLLM has one version of full weights: "
            f"set evaluation.every = 0, or policies.{full[0]}.lora"
        )
