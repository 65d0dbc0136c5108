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
    reward: str
    """What the rewards on the page mean."""
    arms: Mapping[str, Arm]
    notes: Sequence[str] = ()
    """Sentences about what the runs show."""
    quick: bool = field(default=False)
    """Whether `--quick` runs it."""


_LAKES = "examples/02_gymnasium.toml"
_LAKE_SETTINGS = ("--steps=64", "--policies.player.step_size=64", "--evaluation.tasks=256", "--evaluation.every=16")
_MATCH = Match(config=f"{HERE}/tictactoe_match.toml", seats=("first", "second"), every=32, games=256)
_COOKBOOK = "tinker-cookbook 0.6.1, recipes"

ANCHORS: Mapping[str, Anchor] = MappingProxyType(
    {
        "arithmetic": Anchor(
            title="Addition without a tool",
            task="“What is 4 + 5?”, “9”, “What is 37 + 58?”: the model adds two numbers up to 100.",
            published="Qwen3.5-9B-Base, steps of 400 episodes: from 0.66 to 1 in the first few steps",
            source=f"{_COOKBOOK}/math_rl/README.md",
            reward="share of right sums, less 0.1 for a reply that was cut off",
            arms={
                "qwen": Arm(
                    title="Qwen2.5-Coder-0.5B-Instruct, LoRA of rank 8, steps of 64",
                    config=f"{HERE}/arithmetic.toml",
                    quick=(
                        *("--steps=3", "--policies.solver.step_size=16"),
                        *("--evaluation.tasks=8", "--evaluation.every=0"),
                    ),
                ),
                "cookbook": Arm(
                    title="the same by the unmodified recipe `math_rl` through `agentrl-tinker`",
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
            notes=(
                "**Reproduced in part.** From a start as high as the published one the reward rises within six steps, "
                "but not to 1: over the 192 tasks of the three seeds, 0.75 ± 0.06 before and 0.89 ± 0.04 after.",
                "**Both doors learn alike.** The recipe's training reward lies within Student's 95% interval of the "
                "three runs of `agentrl train` in each of the 12 steps; over them it is 0.01 ± 0.03 higher. Group "
                "size, groups, learning rate, rank, tokens and loss are the same; the recipe's prompt has no system "
                "message.",
            ),
            quick=True,
        ),
        "tictactoe": Anchor(
            title="Self-play for 256 steps",
            task="TextArena's TicTacToe. The policy plays both sides, and learns from both.",
            published="Qwen3-4B-Instruct-2507, steps of 512 episodes, reward from -1 to 1 against the base model: from "
            "-0.4 to +0.5 … +0.7 at step 40, collapse at steps 80 to 110, then below the base model (-0.1 … -0.25) "
            "until step 256. The README names games against frozen copies of the weights as a possible remedy",
            source=f"{_COOKBOOK}/multiplayer_rl/text_arena/README.md",
            reward="score in games from the empty board against the model at step 0, 1 for a win and 0.5 for a draw; "
            "twice the score less 1 is the published scale",
            arms={
                "self": Arm(
                    title="against itself alone",
                    config=f"{HERE}/tictactoe_self.toml",
                    quick=("--steps=3",),
                    match=_MATCH,
                    seeds=5,
                ),
                "pool": Arm(
                    title="half of the games against past versions",
                    config=f"{HERE}/tictactoe_pool.toml",
                    quick=("--steps=3",),
                    match=_MATCH,
                    seeds=5,
                ),
            },
            notes=(
                "**The collapse did not appear**, with or without the pool, so these runs do not show whether the pool "
                "prevents it. The model (0.09 M parameters) and the step (32 episodes) differ from the published run.",
            ),
        ),
        "frozen_lake": Anchor(
            title="Frozen lakes, with and without a filter of groups",
            task="Gymnasium's FrozenLake on maps of 4 by 4 squares, not slippery; one move a turn.",
            published="Qwen2.5-0.5B-Instruct: training on the groups whose rewards vary most delays the collapse of "
            "multi-turn training, and reaches higher rewards than without a filter",
            source="RAGEN, arXiv 2504.20073, sections on StarPO-S",
            reward="share of 256 unseen lakes crossed",
            arms={
                "all": Arm(title="all groups", config=_LAKES, settings=_LAKE_SETTINGS),
                "filtered": Arm(
                    title="groups of equal rewards are replaced (`credit.dynamic_sampling`)",
                    config=_LAKES,
                    settings=(*_LAKE_SETTINGS, "--credit.dynamic_sampling=true"),
                ),
            },
            notes=(
                "**Both learn**, and differ by less than their seeds do. Nothing collapses, so these runs do not show "
                "whether the filter delays a collapse.",
                "Until 30 November this page reported four collapses in six runs. The example's training reward "
                "caused them: it paid walking to and fro beside the start more than a try that ends in a hole. "
                "Running out of moves now costs 0.25; the held-out reward is the same.",
            ),
        ),
        "sokoban": Anchor(
            title="Sokoban, with and without a filter of groups",
            task="One box on six by six squares with outer walls, one move a turn. Each level is made by 12 random "
            "moves backward from its solution, and 12 moves are allowed.",
            published="Qwen2.5-0.5B-Instruct: as for frozen lakes",
            source="RAGEN, arXiv 2504.20073, sections on StarPO-S",
            reward="share of 256 unseen levels solved",
            arms={
                "taught": Arm(
                    title="80 supervised steps of 64 levels, half of the moves random",
                    config=f"{HERE}/sokoban_taught.toml",
                ),
                "all": Arm(
                    title="then 48 steps of 64 episodes by reward, all groups",
                    config=f"{HERE}/sokoban.toml",
                    start_from="taught",
                    start_policy="player",
                ),
                "filtered": Arm(
                    title="the same, groups of equal rewards are replaced (`credit.dynamic_sampling`)",
                    config=f"{HERE}/sokoban.toml",
                    settings=("--credit.dynamic_sampling=true",),
                    start_from="taught",
                    start_policy="player",
                ),
            },
            notes=(
                "**No run collapsed, so the filter had nothing to prevent.** All runs rise above their supervised "
                "start. With the filter the end is higher in each seed, by 0.06 ± 0.10, which may be chance.",
            ),
        ),
        "countdown": Anchor(
            title="Countdown with a solver and a judge",
            task="“Numbers: 3, 8, 2. Target: 9.”, “3 + 8 - 2”: three numbers up to 9 are added or subtracted, each "
            "once. The solver tries twice, and the judge chooses one of the two. In training, being "
            "chosen is rewarded, too.",
            published="an example in which one policy plays solver and judge; no result in which two policies learned "
            "was found",
            source="rLLM, examples/solver_judge",
            reward="share of right expressions",
            arms={
                "both": Arm(
                    title="solver and judge learn, as two adapters on SmolLM2-135M-Instruct",
                    config=f"{HERE}/countdown.toml",
                    policy="solver",
                ),
                "frozen": Arm(
                    title="the solver learns, the judge stays the base model",
                    config=f"{HERE}/countdown_frozen.toml",
                    policy="solver",
                ),
            },
            notes=(
                "**Both learn; the judge makes no difference.** The share of right expressions rises as much beside a "
                "judge that learns as beside a frozen one, in each of three seeds. The choice of the judge that learns "
                "is right in 0.13 of the problems before and 0.38 after (means of three seeds), no more than the "
                "solver's expressions are.",
            ),
        ),
        "tool_call": Anchor(
            title="A tool, called by a model of 0.5 B parameters",
            task="Word problems with one operation on numbers up to 998, and a tool `calculate(a, op, b)`.",
            published="no result of this size; Qwen2.5-Coder-0.5B-Instruct calls tools, but not in the form that its "
            "chat template asks for",
            source="the README of agentrl",
            reward="half for a call whose result is the answer, half for then stating the answer",
            arms={
                "json": Arm(
                    title='Qwen2.5-Coder-0.5B-Instruct, LoRA of rank 8, `model.reply_format = "json"`',
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
            notes=(
                "**Learned.** After eight steps of 16 episodes, all of 32 held-out problems earn the whole reward in "
                "two seeds, and 31 in the third; the exact 95% interval of the share of such problems is 0.89 to 1 for "
                "a seed with all.",
            ),
        ),
        "files": Anchor(
            title="Three tools and files",
            task="“How many pears and saws are there together?”: the model lists four files, reads two, and writes the "
            "sum into a third. The tools are `list_files`, `read_file` and `write_file`.",
            published="no result of this size",
            source="the same model as above",
            reward="a quarter for reading each of the two files, half for writing the right sum",
            arms={
                "qwen": Arm(
                    title='Qwen2.5-Coder-0.5B-Instruct, LoRA of rank 8, `model.reply_format = "json"`',
                    config=f"{HERE}/files.toml",
                ),
            },
            notes=(
                "**Learned in part.** Before training, the model calls the tools in the form that is read, but repeats "
                "a call until no turn is left (8 of 16 held-out tasks of seed 0), or writes a number before it has "
                "read a file. After four steps it reads the files in turn, which earns the half for reading, and "
                "writes a number in the last turn. No sum was right, in either seed.",
            ),
        ),
        "reverse_text": Anchor(
            title="Reversed texts: supervised steps, then reward",
            task="Three words, to be written backward character by character.",
            published="Qwen3-0.6B on longer texts: 0.05 before, 0.8 after supervised steps and 20 RL steps of 128 "
            "episodes",
            source="prime-rl, examples/reverse_text",
            reward="similarity of the reply to the reversed text: twice the length of the matching blocks, over both "
            "lengths",
            arms={
                "taught": Arm(
                    title="24 supervised steps of 16 texts, all weights",
                    config=f"{HERE}/reverse_text_taught.toml",
                ),
                "rewarded": Arm(
                    title="then 20 steps of 32 episodes by reward, LoRA",
                    config=f"{HERE}/reverse_text.toml",
                    start_from="taught",
                    start_policy="writer",
                ),
            },
            notes=(
                "**Reproduced in part.** Supervised steps raise the reward as published, in each of three seeds. "
                "Whether the steps by reward do is open: held out, they change it by -0.01, 0.08 and 0.01. The "
                "published run takes steps of 128 episodes.",
            ),
        ),
        "guess_number": Anchor(
            title="Guess a number",
            task="A number between 0 and 1024, ten guesses, each answered by “Too low” or “Too high”.",
            published="Qwen3.5-4B, steps of 256 episodes: from about 0 to 0.8 and more within 20 steps",
            source=f"{_COOKBOOK}/multiplayer_rl/guess_number/README.md",
            reward="1 for the right number, less 1 for each reply that is no guess",
            arms={
                "qwen": Arm(
                    title="Qwen2.5-Coder-0.5B-Instruct, LoRA of rank 32, steps of 16",
                    config=f"{HERE}/guess_number.toml",
                    seeds=1,
                ),
                "cookbook": Arm(
                    title="the same by the unmodified recipe `guess_number` through `agentrl-tinker`",
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
            notes=(
                "**Not reproduced: the format is learned, the search is not.** The share of replies that are no guess "
                "falls from 47% to 2% in four training steps of 16 games. One training game and no held-out game found "
                "the number: the model changes its guess by about one a turn. The published run took twenty steps of "
                "256 games.",
                "**Both doors learn alike.** The training rewards are -4.69, -0.81, 0.06 and -0.19 with "
                "`agentrl train`, and -4.69, -0.25, -0.06 and -0.06 with the recipe; the held-out rewards at the end "
                "agree within their intervals.",
            ),
        ),
    }
)
