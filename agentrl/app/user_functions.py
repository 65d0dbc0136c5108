"""The user's loss, advantage and scorers of a run, loaded once, and the combinations that their declarations allow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from agentrl.app.scoring import find_scorer_codes
from agentrl.config.algorithms import ADVANTAGES, LOSSES
from agentrl.config.combinations import UNLOADED, Declarations, credit_parts, learner_parts
from agentrl.config.policies import PolicyConfig
from agentrl.config.scorers import ScorerConfig
from agentrl.config.sections import AdvantageConfig, CreditConfig, LossConfig, TrainerConfig
from agentrl.core.custom_functions import (
    BEYOND_EPISODE,
    FunctionCode,
    Kind,
    check_options,
    declaration_of,
    find_function,
)
from agentrl.core.parts import check_compatible
from agentrl.credit.estimators import AdvantageEstimator, make_advantage_estimator

Found = tuple[FunctionCode, Callable[..., Any]]
"""A function of the user, behind its code."""


class UserFunctions(NamedTuple):
    """The user's loss, advantage and scorers, loaded once, so that the recorded code is the code that runs."""

    codes: Sequence[tuple[Kind, FunctionCode]]
    """Kind and code of the functions that are not built in."""
    estimator: AdvantageEstimator | None
    """Advantage estimator, if it takes a `Group`."""
    compares_in_step: bool
    """Whether the loss or the estimator compares conversations of a step, which then has to hold whole groups."""


def load_user_functions(
    trainer: TrainerConfig,
    credit: CreditConfig,
    scorers: Mapping[str, ScorerConfig],
    trained: Mapping[str, PolicyConfig],
) -> UserFunctions:
    """Load the user's loss, advantage and scorers, if the run has them, and check the options of any.

    Raises:
        ConfigError: there is no such function, or it cannot be recorded, or its options do not fit, or its declaration
            does not fit other settings, or a policy lacks the reference that the loss reads.
    """
    loss, advantage = trainer.loss, credit.advantage
    found = _find_functions(loss, advantage)
    codes: list[tuple[Kind, FunctionCode]] = [("scorer", code) for code in find_scorer_codes(scorers).values()]
    codes += [(kind, code) for kind, (code, _) in found.items()]
    if "loss" in found:
        check_options(found["loss"][1], loss.options, "trainer.loss")
    elif loss.options:
        from agentrl.learn.losses import make_loss

        make_loss(trainer)
    estimator = None
    if "advantage" in found:
        estimator = make_advantage_estimator(advantage.name, advantage.options, found["advantage"][1])
    declared = _declared(found)
    check_compatible([*credit_parts(credit, loss, declared), *learner_parts(loss, trained)])
    grouping = LOSSES.get(loss.name, declared.loss).grouping(loss.options)
    over = ADVANTAGES.get(advantage.name, declared.advantage).over
    return UserFunctions(codes, estimator, grouping in BEYOND_EPISODE or over == "step")


def load_declarations(loss: LossConfig, advantage: AdvantageConfig) -> Declarations:
    """Load what the user's loss and advantage declare.

    Raises:
        ConfigError: there is no such function.
    """
    return _declared(_find_functions(loss, advantage))


def _find_functions(loss: LossConfig, advantage: AdvantageConfig) -> dict[Kind, Found]:
    """Find the user's loss and advantage, by kind; built-in ones are left out.

    Raises:
        ConfigError: there is no such function.
    """
    found: dict[Kind, Found] = {}
    if loss.name not in LOSSES:
        found["loss"] = find_function("loss", loss.name, key="trainer.loss.name")
    if advantage.name not in ADVANTAGES:
        found["advantage"] = find_function("advantage", advantage.name, key="credit.advantage")
    return found


def _declared(found: Mapping[Kind, Found]) -> Declarations:
    marks = {kind: declaration_of(function) for kind, (_, function) in found.items()}
    return UNLOADED._replace(
        loss=marks.get("loss", UNLOADED.loss), advantage=marks.get("advantage", UNLOADED.advantage)
    )
