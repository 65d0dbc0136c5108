"""What the journal pays for: evaluations that stop when they know, changes that are judged on recorded episodes, and
rewards that are attacked before training.

    python -m benchmarks.journal [--quick] [--part demo|looks|shipping|rewards|whatif|reuse]

* `demo`. The held-out rewards of the README's demo, before its first step and after its last, in 300 random orders:
  `tasks_share`, the median share of the tasks that are played until it is decided which is better;
  `demo_undecided`, the share of the orders in which all tasks decide nothing. The demo takes minutes, so `--quick`
  leaves it out.
* `looks`. Two policies on 512 tasks, with a look after each. `false_alarms`: how often equal policies are called
  different; `false_alarms_t_test`: the same of a t-test that is repeated after each task. `power_005` and `power_010`:
  how often a difference of .05 (.85 and .90) and .10 (.70 and .80) is found, at the looks of an evaluation;
  `tasks_005`, `tasks_010`: mean number of tasks played; `fixed_power_…`: how often one t-test of all tasks finds it.
* `shipping`. Runs with 20 evaluations on 512 tasks, of which 40 % flip between versions. `ships_worse`: the share of
  runs that do not learn, most of whose versions are a little worse than the start, and that choose a worse one;
  `…_with_margin`: the same with a margin of .05; `…_by_mean`: if the largest mean over all tasks chooses. `gain_kept…`:
  in runs that learn, the gain of the chosen version over that of the best one. `run_tasks_share…`: tasks that all
  versions of these runs play, of those that evaluations of a fixed size play.
* `rewards`. `planted_rewards_found`, of `planted_rewards`: environments whose reward training would break, and that
  `agentrl env check` finds; `sound_accused`, of `sound_rewards`: sound ones that it accuses, the bundled environments
  among them.
* `whatif`. A tool that a tenth of the episodes call says something else. `tokens_saved`: the share of a new
  evaluation's tokens that `agentrl run whatif` does not sample; `whatif_z`: how many standard errors its mean
  difference is from the true one, over five seeds; `whatif_z_without_sampling`, the control: the same if the recorded
  replies stayed; `rerun_z`: its mean reward against new evaluations; `tokens_of_no_change`: tokens sampled for
  unchanged code.
* `reuse`. Slow tools, and a trainer that waits for them: what it gains by training each episode in K steps that are K
  times smaller. `reuse_K_over_once`: seconds to a mean reward of .9, over a run that trains each episode once;
  `reuse_K_over_small_steps`: over such a run whose steps are as small; `…_high_rate`, `…_highest_rate`: at four and
  eight times the learning rate; medians of five seeds in virtual time. `whole_steps_reuse_over_once`: if the new
  episodes of a step are as many as without reuse.
  `reuse_4_over_once_same_rate`: for K = 4, with a quarter of the learning rate. `busy_trainer_reuse_over_once`, the
  control: K = 2 in lockstep, where the trainer has no time to spare. `real_…`: the calculator, until the episodes that
  begin reach a mean reward of .85 and .9; not in `--quick`.
"""

from __future__ import annotations

import contextlib
import math
import random
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from agentrl.core.betting import EACH_SIDE, VERDICTS, Verdict, budget_share, decide
from agentrl.core.records import PolicyVersion
from agentrl.inspection.reader import RunReader
from agentrl.observe.metrics import VERDICT, VERDICT_ERROR
from agentrl.orchestrator.evaluation import MISSED, looks
from agentrl.orchestrator.versions import BestCheckpointTracker
from benchmarks import journal_reuse
from benchmarks.parts import outcomes, run_functions
from benchmarks.processes import command
from tests.support import changed_shop

FIGURES = (
    *("tasks_share", "demo_undecided", "false_alarms", "false_alarms_t_test"),
    *("power_005", "tasks_005", "fixed_power_005", "power_010", "tasks_010", "fixed_power_010"),
    *("ships_worse", "ships_worse_with_margin", "ships_worse_by_mean"),
    *("gain_kept", "gain_kept_with_margin", "gain_kept_by_mean", "run_tasks_share", "run_tasks_share_with_margin"),
    *("planted_rewards_found", "planted_rewards", "sound_accused", "sound_rewards"),
    *("tokens_saved", "whatif_z", "whatif_z_without_sampling", "rerun_z", "tokens_of_no_change"),
    *journal_reuse.FIGURES,
)
TASKS = 512
ORDERS = 300
Z = 1.96
FIRST_T_TEST = 10
"""Tasks before the first t-test: fewer have no variance to speak of."""
EVALUATIONS = 20
RUN_TASKS = 512
START = 0.6
"""Mean reward of a simulated run's start."""
FLIPS = 0.4
"""Share of the tasks whose outcome a version draws by itself; that of others depends on how hard the task is."""
MARGIN = 0.05


def play_until_decided(
    differences: Sequence[float], stops: Iterable[int], errors: tuple[float, float] = EACH_SIDE, margin: float = 0.0
) -> tuple[Verdict, int]:
    """Return the verdict of an evaluation that looks at these numbers of tasks, and the tasks played."""
    counts, seen, verdict = Counter[float](), 0, VERDICTS[1]
    for stop in stops:
        counts.update(differences[seen:stop])
        seen, verdict = stop, decide(counts, margin, errors=errors)
        if verdict != "undecided":
            break
    return verdict, seen


def t_test(count: int, total: float, squares: float) -> bool:
    """Whether a t-test calls the mean of so many differences, with this sum and sum of squares, different from 0."""
    variance = max(squares / count - (total / count) ** 2, 1e-9)
    return abs(total / count) > Z * math.sqrt(variance / count)


def repeated_t_test(differences: Sequence[float]) -> bool:
    """Whether a t-test after each task ever calls the policies different."""
    total = squares = 0.0
    for count, difference in enumerate(differences, 1):
        total, squares = total + difference, squares + difference**2
        if count >= FIRST_T_TEST and t_test(count, total, squares):
            return True
    return False


def demo(quick: bool) -> dict[str, float | None]:
    if quick:  # the demo takes minutes
        return {"tasks_share": None, "demo_undecided": None}
    with tempfile.TemporaryDirectory(prefix="agentrl-journal-") as directory:
        command("demo", directory=Path(directory))
        return demo_figures(Path(directory, "runs", "demo"))


def demo_figures(run: Path) -> dict[str, float | None]:
    """The figures of a finished demo."""
    rewards: dict[int, dict[str, float]] = {}
    with contextlib.closing(RunReader(run)) as reader:
        for spec, header in reader.log.members(purpose="evaluate"):
            (trajectory,) = header.trajectories
            rewards.setdefault(trajectory.oldest_step, {})[spec.task.id] = trajectory.reward or 0.0
    before, after = rewards[min(rewards)], rewards[max(rewards)]
    differences = [after[task] - before[task] for task in before if task in after]
    draw, played, undecided = random.Random("orders"), list[int](), 0
    for _ in range(ORDERS):
        draw.shuffle(differences)
        verdict, tasks = play_until_decided(differences, looks(len(differences)))
        played.append(tasks)
        undecided += verdict == "undecided"
    print(
        f"  {statistics.fmean(before.values()):.3f} before, {statistics.fmean(after.values()):.3f} after: "
        f"{statistics.median(played):.0f} of {len(differences)} tasks decide, at most {max(played)}"
    )
    return {"tasks_share": statistics.median(played) / len(differences), "demo_undecided": undecided / ORDERS}


def looks_figures(quick: bool) -> dict[str, float | None]:
    repetitions = 150 if quick else 1500
    draw = random.Random("looks")

    def differences(first: float, second: float) -> list[float]:
        return [float(draw.random() < second) - float(draw.random() < first) for _ in range(TASKS)]

    alarms = t_alarms = 0
    for repetition in range(repetitions):
        level = (0.5, 0.8, 0.95)[repetition % 3]
        equal = differences(level, level)
        alarms += play_until_decided(equal, range(1, TASKS + 1))[0] != "undecided"
        t_alarms += repeated_t_test(equal)
    figures: dict[str, float | None] = {
        "false_alarms": alarms / repetitions,
        "false_alarms_t_test": t_alarms / repetitions,
    }
    for name, first, second in (("005", 0.85, 0.90), ("010", 0.70, 0.80)):
        found, fixed, played = 0, 0, 0
        for _ in range(repetitions):
            better = differences(first, second)
            verdict, tasks = play_until_decided(better, looks(TASKS))
            found, played = found + (verdict == "better"), played + tasks
            fixed += sum(better) > 0 and t_test(TASKS, sum(better), sum(each**2 for each in better))
        figures |= {
            f"power_{name}": found / repetitions,
            f"tasks_{name}": played / repetitions,
            f"fixed_power_{name}": fixed / repetitions,
        }
        print(
            f"  +{second - first:.2f}: found {found / repetitions:.2f} with {played / repetitions:.0f} tasks; "
            f"one t-test of {TASKS} tasks finds {fixed / repetitions:.2f}"
        )
    return figures


class SimulatedRun:
    """A run whose versions solve tasks with known probabilities; each version is evaluated once."""

    def __init__(self, changes: Sequence[float], draw: random.Random) -> None:
        shared = [draw.random() for _ in range(RUN_TASKS)]
        self.means = [START + change for change in changes]
        self.rewards = [
            [float((draw.random() if draw.random() < FLIPS else luck) < mean) for luck in shared] for mean in self.means
        ]

    def chosen(self, margin: float | None) -> tuple[float, int]:
        """Return the true mean of the version that a run chooses, and the number of tasks that its versions played.

        Args:
            margin: margin of the verdicts that choose; None: the largest mean over all tasks chooses.
        """
        best = BestCheckpointTracker(metric="evaluation/reward", policy="policy")
        played = [0] * len(self.rewards)
        for step, rewards in enumerate(self.rewards):
            metrics, stop = dict[str, float](), RUN_TASKS
            if margin is not None and best.measured.versions:
                at = best.measured.versions["policy"].step
                differences = [now - before for now, before in zip(rewards, self.rewards[at], strict=True)]
                error = budget_share(best.measured.spent, len(self.rewards) - step)
                verdict, stop = play_until_decided(differences, looks(RUN_TASKS), (error, MISSED), margin)
                metrics |= {VERDICT: float(VERDICTS.index(verdict) - 1), VERDICT_ERROR: error}
                stop = RUN_TASKS if verdict == "better" else stop
            played[step] = stop
            metrics["evaluation/reward"] = statistics.fmean(rewards[:stop])
            best.record_metrics("policy", metrics, {"policy": PolicyVersion("policy", 0, step)})
        return self.means[best.measured.versions["policy"].step], sum(played)


def shipping(quick: bool) -> dict[str, float | None]:
    draw, runs = random.Random("shipping"), 40 if quick else 200
    rules = {"": 0.0, "_with_margin": MARGIN, "_by_mean": None}
    worse, gains, tasks = Counter[str](), dict.fromkeys(rules, 0.0), Counter[str]()
    possible = 0.0
    for _ in range(runs):
        idle = SimulatedRun([0.0, *(draw.gauss(-0.02, 0.02) for _ in range(EVALUATIONS))], draw)
        learning = SimulatedRun([0.35 * (1 - math.exp(-step / 5)) for step in range(EVALUATIONS + 1)], draw)
        possible += max(learning.means) - learning.means[0]
        for name, margin in rules.items():
            worse[name] += idle.chosen(margin)[0] < idle.means[0]
            mean, played = learning.chosen(margin)
            gains[name] += mean - learning.means[0]
            tasks[name] += played
    for name in rules:
        print(
            f"  {name.strip('_').replace('_', ' ') or 'by verdict'}: {worse[name]} of {runs} idle runs choose a worse "
            f"version; learning runs keep {gains[name] / possible:.2f} of the gain with "
            f"{tasks[name] / tasks['_by_mean']:.2f} of the tasks"
        )
    return {
        **{f"ships_worse{name}": worse[name] / runs for name in rules},
        **{f"gain_kept{name}": gain / possible for name, gain in gains.items()},
        **{f"run_tasks_share{name}": tasks[name] / tasks["_by_mean"] for name in ("", "_with_margin")},
    }


def rewards(quick: bool) -> dict[str, float | None]:
    if quick:  # forty environments take a minute by themselves
        return dict.fromkeys(("planted_rewards_found", "planted_rewards", "sound_accused", "sound_rewards"))
    passed = outcomes("tests/unit/test_reward_check.py")
    planted, sound = (
        [each for name, each in passed.items() if name.startswith(start)] for start in ("test_planted", "test_sound")
    )
    return {
        "planted_rewards_found": float(sum(planted)),
        "planted_rewards": float(len(planted)),
        "sound_accused": float(sound.count(False)),
        "sound_rewards": float(len(sound)),
    }


def whatifs(quick: bool) -> dict[str, float | None]:
    """Judge a changed tool on recorded episodes, with a scripted policy whose probabilities are known."""
    seeds, tasks = (2, 200) if quick else (5, 800)
    before, differences, new = list[float](), list[float](), list[float]()
    sampled = tokens = unchanged = 0
    with tempfile.TemporaryDirectory(prefix="agentrl-whatif-") as directory:
        for seed in range(seeds):
            run = changed_shop.record(Path(directory), tasks=tasks, seed=seed)
            result = changed_shop.judged(run, changed_shop.Hinting)
            before += [episode.before["agent"] for episode in result.episodes]
            differences += [episode.after["agent"] - episode.before["agent"] for episode in result.episodes]
            sampled += result.sampled
            tokens += sum(episode.tokens for episode in result.episodes)
            unchanged += changed_shop.judged(run, changed_shop.Shop).sampled
            again = changed_shop.record(Path(directory), tasks=tasks, seed=seed, environment=changed_shop.Hinting)
            new += changed_shop.rewards(again)
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    spread = math.hypot(*(statistics.stdev(each) / math.sqrt(len(each)) for each in (before, new)))
    mean = statistics.fmean(differences)
    return {
        "tokens_saved": 1 - sampled / tokens,
        "whatif_z": abs(mean - changed_shop.EFFECT) / error,
        "whatif_z_without_sampling": changed_shop.EFFECT / error,
        "rerun_z": abs(statistics.fmean(before) + mean - statistics.fmean(new)) / spread,
        "tokens_of_no_change": float(unchanged),
    }


if __name__ == "__main__":
    functions = {
        "demo": demo,
        "looks": looks_figures,
        "shipping": shipping,
        "rewards": rewards,
        "whatif": whatifs,
        "reuse": journal_reuse.figures,
    }
    run_functions("journal", FIGURES, functions, description=__doc__)
