"""What the benchmark adds to each contestant's script: a line per step, and the tools' waits.

Imported by the scripts of this directory in each library's own environment, so it needs nothing but the standard
library. Lines that use it end in `# measured` and are not counted as the user's code.

The log has one JSON object per line: `t`, the system clock in seconds, with `begin` before the first step, or with
`step`, `sampled` (tokens, or null if the server counts them) and `trained` (tokens) after each; asynchronous
contestants add `staleness_mean` and `staleness_max` (steps, of the trained episodes) and `dropped` (episodes too old).
"""

import json
import math
import random
import sys
import time
from collections import deque
from pathlib import Path

MEDIAN_S, P90_S = 0.5, 2.5
SETTINGS = json.loads(Path(sys.argv[-1]).read_text()) if sys.argv[-1].endswith(".json") else {}


def write(**values):
    """Append a line to the log."""
    with Path(SETTINGS["log"]).open("a") as file:
        file.write(json.dumps({"t": time.time(), **values}) + "\n")


def draw_wait():
    """Seconds that a tool call waits: log-normal (median 0.5 s, P90 2.5 s), or 0 where the part has no waits."""
    if not SETTINGS.get("waits"):
        return 0.0
    return random.lognormvariate(math.log(MEDIAN_S), math.log(P90_S / MEDIAN_S) / 1.2815515655446004)


def trl_callback(episodes):
    """A callback of transformers for TRL's trainers, whose step trains on `episodes`."""
    from transformers import TrainerCallback

    class Progress(TrainerCallback):
        begun = False

        def on_step_begin(self, args, state, control, **_):
            if not self.begun:
                write(begin=True)
                self.begun = True

        def on_step_end(self, args, state, control, **_):
            self.ended = time.time()

        def on_log(self, args, state, control, logs=None, **_):
            logs = logs or {}
            if "batch/trained_tokens_per_step" in logs:  # asynchronous: the server knows what was sampled
                write(
                    step=state.global_step,
                    t=self.ended,
                    sampled=None,
                    trained=logs["batch/trained_tokens_per_step"],
                    staleness_mean=logs["sample/staleness_mean"],
                    staleness_max=logs["sample/staleness_max"],
                    dropped=logs.get("sample/dropped_stale_total", 0),
                )
            elif "completions/mean_length" in logs and "server" not in SETTINGS:  # else: the summary at the end
                tokens = logs["completions/mean_length"] * episodes
                write(step=state.global_step, t=self.ended, sampled=tokens, trained=tokens)

    return Progress()


class AgentrlObserver:
    """An observer for `agentrl.train`."""

    def __init__(self):
        self.sampled = deque([(0.0, 0.0)], maxlen=6)
        """Seconds and tokens sampled so far at the newest steps."""
        self.dropped = 0.0

    def on_step(self, policy, step, metrics):
        """Write the step; before the first, when the run began."""
        now, seconds = time.time(), metrics["run/seconds"]
        if len(self.sampled) == 1:
            write(begin=True, t=now - seconds)
        before = self.sampled[-1][1]
        since, tokens = self.sampled[len(self.sampled) == self.sampled.maxlen]
        total = tokens + metrics.get("tokens/sampled_per_s", 0.0) * (seconds - since)  # a rate over five steps
        self.sampled.append((seconds, max(before, total)))
        write(
            step=step,
            t=now,
            sampled=self.sampled[-1][1] - before,
            trained=metrics["step/tokens"],
            staleness_mean=metrics["staleness/mean"],
            staleness_max=metrics["staleness/max"],
            dropped=metrics["episodes/dropped"] - self.dropped,
        )
        self.dropped = metrics["episodes/dropped"]

    def on_evaluation(self, versions, metrics):
        """Ignored."""
