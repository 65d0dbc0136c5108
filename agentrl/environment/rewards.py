"""Checks of the rewards that environments give: finite numbers of a sensible size, under names that are identifiers."""

from __future__ import annotations

import inspect
import reprlib
import sys
from collections.abc import Awaitable
from decimal import Decimal
from numbers import Real
from typing import TypeVar

from agentrl.core.errors import RewardError

T = TypeVar("T")

LARGEST_REWARD = 1e6
"""A larger reward, positive or negative, is refused as a mistake."""

LONGEST_REWARD_NAME = 64


def finite_reward(value: object, where: str) -> float:
    """Convert a reward, a real number of Python or numpy or an array of one, to a float.

    Args:
        value: the reward an environment gave.
        where: the agent and turn, for the message.

    Raises:
        RewardError: the value is None, a string, another object that converts to a float, NaN, or larger than
            `LARGEST_REWARD` in either direction.
    """
    numpy = sys.modules.get("numpy")  # a numpy value exists only if numpy was imported
    value = _number_in_array(value)
    is_number = isinstance(value, Real | Decimal) or (
        numpy is not None and isinstance(value, numpy.floating | numpy.bool_)
    )
    # Timedelta64 claims to be an integer.
    if not is_number or (numpy is not None and isinstance(value, numpy.timedelta64)):
        value_text = reprlib.repr(value)  # bounds the length of any object's repr
        raise RewardError(f"{where}: the reward is {value_text} ({type(value).__name__}); it must be a finite number")
    try:
        number = float(value)  # type: ignore[arg-type]
    except (OverflowError, TypeError, ValueError) as error:
        raise RewardError(
            f"{where}: the reward, of type {type(value).__name__}, is not a finite real number ({error})"
        ) from error
    if not abs(number) <= LARGEST_REWARD:  # also true for NaN
        raise RewardError(
            f"{where}: the reward is {number:g}; it must be finite and no larger than {LARGEST_REWARD:g} either way, "
            "since one such reward would decide the whole step: scale rewards to about 1"
        )
    return number


def stated_reward(value: object, where: str) -> float:
    """Convert a reward that another program or library states. Unlike in an environment's own code, true and false are
    not numbers there: their meaning is unknown.

    Raises:
        RewardError: see `finite_reward`; or the value is a truth value.
    """
    numpy = sys.modules.get("numpy")
    value = _number_in_array(value)
    if isinstance(value, bool) or (numpy is not None and isinstance(value, numpy.bool_)):
        raise RewardError(f"{where}: the reward is {value} ({type(value).__name__}); it must be a finite number")
    return finite_reward(value, where)


def _number_in_array(value: object) -> object:
    """Return the number in an array or tensor of shape () or (1,), as vectorized environments give it; else the
    value."""
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and isinstance(value, numpy.ndarray) and value.shape in ((), (1,)):
        return value.reshape(())[()]
    if torch is not None and isinstance(value, torch.Tensor) and value.shape in ((), (1,)):
        return value.item()
    return value


def check_reward_name(name: object, where: str) -> None:
    """Check the name of a reward.

    Raises:
        RewardError: the name is not an identifier of at most 64 characters.
    """
    if not isinstance(name, str) or not (name.isascii() and name.isidentifier()) or len(name) > LONGEST_REWARD_NAME:
        raise RewardError(
            f"{where}: {reprlib.repr(name)} is not a valid name for a reward; give a Python identifier of at most "
            f"{LONGEST_REWARD_NAME} characters, such as 'correct'"
        )


async def awaited_reward(environment: type, value: T | Awaitable[T] | None) -> T:
    """Return what the `reward` of an environment returned, which may be `async`.

    Raises:
        RewardError: it returned None.
    """
    reward: T | None = await value if inspect.isawaitable(value) else value
    if reward is None:
        raise RewardError(f"{environment.__name__}.reward returned None; return a number")
    return reward
