"""Who plays what: policies bound to the seats of an environment and of the child episodes it declares.

An environment declares its children in `fan_out`, by class name: `{"Solve": 8}`. The class is looked up in the
environment's own module. Their seats are bound as `Solve.solver`, else by the bare name.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from agentrl.app.weights import adapter_places
from agentrl.config.policies import PolicyConfig
from agentrl.config.run import RunConfig
from agentrl.core.errors import ConfigError
from agentrl.core.ports import EngineCapabilities
from agentrl.core.words import plural
from agentrl.environment.base import Environment, children_of
from agentrl.orchestrator.scheduler import Demand
from agentrl.rollout.context import MAX_CHILD_DEPTH


def policy_binding(config: RunConfig) -> Callable[[str, int], str]:
    """Which policy holds a seat in a root group.

    Raises (when called):
        ConfigError: the seat is bound to nothing.
    """

    def policy_of(seat: str, group: int) -> str:
        try:
            return config.policy_of(seat, group)
        except ValueError as error:
            raise ConfigError(str(error)) from None

    return policy_of


class Casting(NamedTuple):
    """The seats of a kind of episode that a root episode brings, by `Env.seat` for children."""

    seats: tuple[str, ...]
    times: int
    """How many such episodes it brings."""


def castings(environment: type[Environment], prefix: str = "", times: int = 1, depth: int = 0) -> Iterator[Casting]:
    """A root episode, and the child episodes it declares."""
    yield Casting(tuple(f"{prefix}{seat}" for seat in environment.seats), times)
    for child, number in children_of(environment).items():
        if depth < MAX_CHILD_DEPTH:
            yield from castings(child, f"{child.__name__}.", times * number, depth + 1)


def demands_of(config: RunConfig, environment: type[Environment]) -> Sequence[Demand]:
    """What a root group brings, for each line-up, group by group; refused where the bounds could never let one in, or a
    policy could never act.

    Raises:
        ConfigError: what does not fit, and the mend.
    """
    cast = list(castings(environment))
    seats = [seat for casting in cast for seat in casting.seats]
    _check_names(config, environment, seats)
    size, policy_of, trained = config.credit.group_size, policy_binding(config), config.trained
    demands = []
    held: set[str] = set()
    for group in range(config.line_ups):
        units: Counter[str] = Counter()
        for casting in cast:
            holders = {policy_of(seat, group) for seat in casting.seats}
            held |= holders
            units.update({name: casting.times * size for name in holders if name in trained})
        demands.append(Demand(episodes=size, units=dict(units)))
    _check_held(config, environment, held, seats)
    for name, policy in trained.items():
        _check_fill(size, name, policy, [demand.units.get(name, 0) for demand in demands])
    if size > config.max_in_flight:
        raise ConfigError(
            f"credit.group_size = {size} is larger than max_in_flight = {config.max_in_flight}, so no group could "
            "start: raise max_in_flight, or lower credit.group_size"
        )
    return demands


def split_groups(config: RunConfig, demands: Sequence[Demand]) -> Iterator[str]:
    """Say of which policies steps end inside a group; nothing is wrong with it, but few mean it.

    Args:
        config: of the run.
        demands: `demands_of` it.
    """
    for name, policy in config.trained.items():
        brought = {demand.units[name] for demand in demands if demand.units.get(name)}
        if config.credit.release == "group" and any(policy.step_size % units for units in brought):
            units = max(brought)
            fitting = max(round(policy.step_size / units), 1) * units
            yield (
                f"policies.{name}.step_size = {policy.step_size} is no multiple of the {plural(units, 'unit')} that a "
                f"group brings, so steps end inside groups: the rest of a group is trained a step later, with the same "
                f"advantages. Set step_size = {fitting} for whole groups"
            )


def _check_fill(size: int, name: str, policy: PolicyConfig, brought: Sequence[int]) -> None:
    """Groups fit the bounds of a policy, and at staleness 0 they fill its steps: only whole ones are let in."""
    most, whole = max(brought), min(brought)
    bound = (1 + policy.max_staleness) * policy.step_size
    if most > bound:
        raise ConfigError(
            f"credit.group_size = {size}: a group brings {plural(most, 'unit')} of {name}, more than may be in flight: "
            f"(1 + max_staleness) × step_size = {bound}; raise policies.{name}.step_size to {most} or more, or lower "
            "credit.group_size or the fan-out"
        )
    if policy.max_staleness == 0 and whole == most and policy.step_size % most:
        full = policy.step_size - policy.step_size % most
        raise ConfigError(
            f"policies.{name}.step_size = {policy.step_size} can never be filled: a group brings "
            f"{plural(most, 'unit')} of {name}, and with max_staleness = 0 no more groups are let in than fit, so "
            f"every step would be of {full}. Set step_size = {full} or {full + most}, or max_staleness = 1"
        )


def _check_held(config: RunConfig, environment: type[Environment], held: Collection[str], seats: list[str]) -> None:
    """Every policy plays somewhere, and one that learns is among them."""
    for name in config.policies:
        if name not in held:
            raise ConfigError(
                f"policies.{name} holds no seat of {environment.__name__} ({', '.join(seats)}): bind it in [seats], "
                "declare the child that seats it in fan_out, or leave it out"
            )
    if not config.trained:
        raise ConfigError(f"no seat of {environment.__name__} is held by a policy that learns: every kind is frozen")


def check_capabilities(config: RunConfig, capabilities: EngineCapabilities) -> None:
    """Refuse at start what the engine cannot give.

    Raises:
        ConfigError: the setting, what it needs, and the engine that lacks it.
    """
    places = adapter_places(config)
    refreshes = {config.refresh_of(name) for name in config.trained}
    needs = {
        **{f"engine.refresh = {refresh!r}": refresh in capabilities.refresh for refresh in sorted(refreshes)},
        "engine.capture_routing": capabilities.expert_routing or not config.engine.capture_routing,
        "sampling.top_k, top_p or min_p (their kept sets)": capabilities.sampling_mask or not config.filtered,
        f"{places} adapters at once (policies.*.lora, opponents, frozen ones)": capabilities.adapters >= places,
    }
    for what, given in needs.items():
        if not given:
            raise ConfigError(f"the engine {capabilities.name!r} cannot give what {what} needs")


def _check_names(config: RunConfig, environment: type[Environment], known: list[str]) -> None:
    """A misspelt seat in the configuration would silently be held by somebody else."""
    names = {*known, *(seat.rsplit(".", 1)[-1] for seat in known)}
    for seat in config.seats:
        if seat not in names:
            near = difflib.get_close_matches(seat, sorted(names), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"its seats: {', '.join(sorted(names))}"
            raise ConfigError(f"seats.{seat}: {environment.__name__} has no such seat; {hint}")
