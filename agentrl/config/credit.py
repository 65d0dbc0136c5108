"""The section about credit: how rewards become advantages, and when groups are released."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from agentrl.config.section import Episodes, Fixed, Free, Section, WaveFixed


class CreditConfig(Section):
    """From rewards to advantages."""

    group_size: Fixed[Episodes] = 8
    """Episodes sampled per task and compared with each other."""
    advantage: Free[str] = "leave_one_out"
    """The baseline of a reward. Over the other members of its group in the same seat: `leave_one_out` (RLOO),
    `group_mean` (Dr. GRPO) or `group_std` (GRPO, by n - 1). `role_mean`: the policy's mean reward in that seat so far
    (zero-sum games, SPIRAL). `none`: REINFORCE on the raw reward. Others, and functions of your own:
    docs/algorithms.md."""
    advantage_options: Free[dict[str, Any]] = {}
    """Arguments of the function, such as `{ k = 4 }`."""
    reward_weights: WaveFixed[dict[str, Annotated[float, Field(allow_inf_nan=False)]]] = {}
    """The weight of each reward of `agent.reward(x, name=…)` in the agent's reward, such as
    `{ correct = 1.0, format = 0.2 }`; empty: each counts 1. Of several names, each needs one. On a resume, rewards that
    were given keep the weight of then."""
    release: Fixed[Literal["group", "episode", "late"]] = "group"
    """When a group's episodes may be trained. `group`: once all of them have ended. `late`: the first half together,
    every later one when it ends, with its full reward and the same first half as baseline. `episode`: each when it
    ends, with earlier groups as baseline (docs/scheduling.md)."""
    dynamic_sampling: Free[bool] = False
    """Drop groups whose advantages are all 0 (`no_signal`), and sample others in their place (DAPO, arXiv:2503.14476;
    docs/selection.md)."""
    turn_credit: Free[Literal["sum", "to_go"]] = "sum"
    """Which tokens `agent.reward(x, turn=…)` counts for. `sum`: the agent's whole trajectory. `to_go`: that turn and
    the turns before it, each turn compared with what the rest of the group earned from that turn on."""
