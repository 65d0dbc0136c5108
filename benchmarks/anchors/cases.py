"""The anchors: what was published, and what is run here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parents[2]
HERE = "benchmarks/anchors"


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """Games between kept versions of a policy and an opponent, which score a run of self-play."""

    config: str
    """TOML file of a game, whose policies are `player` and `opponent`."""
    seats: tuple[str, str]
    every: int
    """Steps between two versions that play."""
    games: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A recipe of tinker-cookbook that trains through `agentrl-tinker`."""

    module: str
    server: str
    """TOML file of the server."""
    settings: Mapping[str, str]
    metric: str = "env/all/reward/total"
    """Reward in the metrics that the recipe writes at each step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """A way to run an anchor: a TOML file, and settings that replace some of its settings."""

    title: str
    config: str
    settings: Sequence[str] = ()
    quick: Sequence[str] = ("--steps=3", "--evaluation.tasks=8", "--evaluation.every=0")
    start_from: str = ""
    """Arm whose trained weights of the same seed replace the base model."""
    start_policy: str = ""
    """Policy of that arm."""
    policy: str = ""
    """Policy whose held-out reward counts, if several are rewarded."""
    match: Match | None = None
    recipe: Recipe | None = None
    """What trains in place of `agentrl train`; `config` is then for the evaluations."""
    seeds: int = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Anchor:
    """A published result and the runs that are compared with it."""

    title: str
    task: str
    published: str
    source: str
    """Empty, as `published`, if nothing was found."""
    reward: str
    """What the rewards on the page mean."""
    arms: Mapping[str, Arm]
    notes: str = ""
    """What the runs show."""
    quick: bool = field(default=False)
    """Whether `--quick` runs it."""


_LAKES = "examples/02_gymnasium.toml"
_LAKE_SETTINGS = ("--steps=64", "--policies.player.step_size=64", "--evaluation.tasks=256", "--evaluation.every=16")
_MATCH = Match(config=f"{HERE}/tictactoe_match.toml", seats=("first", "second"), every=32, games=256)
_COOKBOOK = "tinker-cookbook 0.6.1, recipes"

ANCHORS: Mapping[str, Anchor] = MappingProxyType(
    {
        "countdown": Anchor(
            title="Solver and judge",
            task="reach a target with three numbers; a judge chooses one of two tries",
            published="one policy in both seats",
            source="rLLM, examples/solver_judge",
            reward="share of right expressions",
            arms={
                "both": Arm(
                    title="solver and judge learn: two adapters, SmolLM2-135M-Instruct",
                    config=f"{HERE}/countdown.toml",
                    policy="solver",
                ),
                "frozen": Arm(
                    title="the solver learns alone",
                    config=f"{HERE}/countdown_frozen.toml",
                    policy="solver",
                ),
            },
            notes="**Both learn; the judge makes no difference.** It chooses a right expression in 0.13 of the "
            "problems before and 0.38 after.",
        ),
        "tictactoe": Anchor(
            title="Self-play",
            task="TicTacToe against the model at step 0",
            published="Qwen3-4B collapses at steps 80 to 110",
            source=f"{_COOKBOOK}/multiplayer_rl/text_arena",
            reward="a win 1, a draw 0.5",
            arms={
                "self": Arm(
                    title="against itself alone",
                    config=f"{HERE}/tictactoe_self.toml",
                    quick=("--steps=3",),
                    match=_MATCH,
                    seeds=5,
                ),
                "pool": Arm(
                    title="half against past versions",
                    config=f"{HERE}/tictactoe_pool.toml",
                    quick=("--steps=3",),
                    match=_MATCH,
                    seeds=5,
                ),
            },
            notes="**No collapse**, with or without past versions, at 0.09 M parameters.",
        ),
        "arithmetic": Anchor(
            title="Addition",
            task="two numbers up to 100, without a tool",
            published="Qwen3.5-9B-Base, 0.66 to 1",
            source=f"{_COOKBOOK}/math_rl",
            reward="share of right sums, less 0.1 for a cut reply",
            arms={
                "qwen": Arm(
                    title="Qwen2.5-Coder-0.5B-Instruct, LoRA",
                    config=f"{HERE}/arithmetic.toml",
                    quick=(
                        *("--steps=3", "--policies.solver.step_size=16"),
                        *("--evaluation.tasks=8", "--evaluation.every=0"),
                    ),
                ),
                "cookbook": Arm(
                    title="by the recipe `math_rl` through `agentrl-tinker`",
                    config=f"{HERE}/arithmetic.toml",
                    recipe=Recipe(
                        module="tinker_cookbook.recipes.math_rl.train",
                        server=f"{HERE}/arithmetic_server.toml",
                        settings={
                            "model_name": "models/Qwen2.5-Coder-0.5B-Instruct",
                            "renderer_name": "qwen3_instruct",
                            "group_size": "4",
                            "groups_per_batch": "16",
                            "learning_rate": "1e-4",
                            "lora_rank": "8",
                            "max_tokens": "8",
                            "max_steps": "12",
                            "loss_fn": "importance_sampling",
                        },
                    ),
                    seeds=1,
                ),
                "smollm2": Arm(
                    title="SmolLM2-135M-Instruct, the same settings",
                    config=f"{HERE}/arithmetic.toml",
                    settings=("--model.path=models/SmolLM2-135M-Instruct",),
                    seeds=1,
                ),
            },
            notes="**Reproduced in part.** The training reward of the recipe lies within the interval of "
            "`agentrl train` in each of 12 steps.",
            quick=True,
        ),
        "frozen_lake": Anchor(
            title="Frozen lakes",
            task="Gymnasium's FrozenLake, 256 unseen maps",
            published="a filter of groups delays collapse",
            source="RAGEN, arXiv 2504.20073",
            reward="share crossed",
            arms={
                "all": Arm(title="all groups", config=_LAKES, settings=_LAKE_SETTINGS),
                "filtered": Arm(
                    title="`credit.dynamic_sampling`",
                    config=_LAKES,
                    settings=(*_LAKE_SETTINGS, "--credit.dynamic_sampling=true"),
                ),
            },
            notes="**Both learn.** Nothing collapsed, so the filter had nothing to delay.",
        ),
        "sokoban": Anchor(
            title="Sokoban",
            task="one box, 256 unseen levels",
            published="as for frozen lakes",
            source="RAGEN",
            reward="share solved",
            arms={
                "taught": Arm(
                    title="supervised steps",
                    config=f"{HERE}/sokoban_taught.toml",
                ),
                "all": Arm(
                    title="then RL, all groups",
                    config=f"{HERE}/sokoban.toml",
                    start_from="taught",
                    start_policy="player",
                ),
                "filtered": Arm(
                    title="then RL, `credit.dynamic_sampling`",
                    config=f"{HERE}/sokoban.toml",
                    settings=("--credit.dynamic_sampling=true",),
                    start_from="taught",
                    start_policy="player",
                ),
            },
            notes="**No collapse.** The gain by the filter, 0.06 ± 0.10, may be chance.",
        ),
        "tool_call": Anchor(
            title="One tool",
            task="word problems with `calculate`",
            published="",
            source="",
            reward="half for the call, half for the answer",
            arms={
                "json": Arm(
                    title="Qwen2.5-Coder-0.5B-Instruct, LoRA",
                    config="examples/16_qwen.toml",
                    settings=("--evaluation.tasks=32",),
                    quick=(
                        "--steps=1",
                        "--evaluation.tasks=4",
                        "--evaluation.every=0",
                        "--policies.solver.step_size=8",
                    ),
                ),
            },
            notes="**Learned**: 31 or 32 of 32 held-out problems earn the whole reward.",
        ),
        "files": Anchor(
            title="Three tools",
            task="read two of four files, write their sum",
            published="",
            source="",
            reward="a quarter for each file, half for the sum",
            arms={
                "qwen": Arm(
                    title="Qwen2.5-Coder-0.5B-Instruct, LoRA",
                    config=f"{HERE}/files.toml",
                ),
            },
            notes="**Learned in part**: it reads the files; no sum was right.",
        ),
        "reverse_text": Anchor(
            title="Reversed texts",
            task="three words backward",
            published="Qwen3-0.6B, 0.05 to 0.8",
            source="prime-rl, examples/reverse_text",
            reward="similarity",
            arms={
                "taught": Arm(
                    title="supervised steps, all weights",
                    config=f"{HERE}/reverse_text_taught.toml",
                ),
                "rewarded": Arm(
                    title="then RL, LoRA",
                    config=f"{HERE}/reverse_text.toml",
                    start_from="taught",
                    start_policy="writer",
                ),
            },
            notes="**Reproduced in part**: supervised steps help as published; RL adds -0.01, 0.08 and 0.01.",
        ),
        "guess_number": Anchor(
            title="Guess a number",
            task="0 to 1024, ten guesses",
            published="Qwen3.5-4B, 0 to 0.8 in 20 steps of 256",
            source=f"{_COOKBOOK}/multiplayer_rl/guess_number",
            reward="1 for the number, less 1 for each invalid reply",
            arms={
                "qwen": Arm(
                    title="Qwen2.5-Coder-0.5B-Instruct, LoRA",
                    config=f"{HERE}/guess_number.toml",
                    seeds=1,
                ),
                "cookbook": Arm(
                    title="by the recipe `guess_number` through `agentrl-tinker`",
                    config=f"{HERE}/guess_number.toml",
                    recipe=Recipe(
                        module="tinker_cookbook.recipes.multiplayer_rl.guess_number.train",
                        server=f"{HERE}/guess_number_server.toml",
                        settings={
                            "model_name": "models/Qwen2.5-Coder-0.5B-Instruct",
                            "renderer_name": "qwen3_instruct",
                            "group_size": "8",
                            "batch_size": "2",
                            "learning_rate": "1e-4",
                            "max_tokens": "10",
                            "max_steps": "4",
                            "eval_every": "0",
                        },
                    ),
                    seeds=1,
                ),
            },
            notes="**Not reproduced**: the format is learned (invalid replies fall from 47% to 2%), the search is not.",
        ),
    }
)
