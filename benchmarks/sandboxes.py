"""Sandboxes: what gets out, which limits hold, what a kill leaves behind, and what they cost.

    python -m benchmarks.sandboxes [--quick] [--part PART]

Run as root, all but the costs are measured as root and as an ordinary user.
* `escapes`: attempts to leave a sandbox that succeeded (`sandbox_attempts.py`), summed over users, of
  `escape_attempts` each. Negative control: `escapes_without`, those that succeed without a sandbox, in namespaces that
  contain the attempts.
* `limits`: `limits_held` of `limits` commands that take all the memory, processes, files, output or time they can get.
* `leaks`: `leaked`, kills that left a process or a mount of a sandbox behind, of `leak_kills` kills of the owner, the
  keeper, or both, a quarter of them while the keeper starts, beside eight busy processes.
* `latency`: `lease_ms`, median time to make a sandbox; `run_ms`, median time of a command over a bare process's;
  `run_cpu_ms`, CPU time of a command in all processes but the keeper; `idle_kb_per_lease`, the keeper's memory per
  sandbox; `snapshot_ms`, median time to read what a command changed: 5 files of 200, with 1.4 MB in all; `at_once`,
  commands that succeed in as many sandboxes at once. `keeper_held_ms`: how much longer than usual a request of another
  sandbox takes, at most, while one's 20,000 long names are read, median of repeats; `loop_held_ms`, the same of the
  worker's event loop, while it takes them in. Control: `walk_ms`, the time of that, for which both would be held if
  they did it themselves.
* `gateway`: `gateway_request_ms`, median time of a sandboxed program's request to its gateway that samples nothing.
* `formats`: `formats` whose rewards were compared with their own code's, `format_rewards` in all, and the share that is
  equal, `format_rewards_equal`; `harness_cpu_per_episode`, CPU seconds of an episode that a standing runner plays, the
  most of the formats. Null without the formats' packages.
* `resume`: `resumed_equal`, share of kills of an episode, one at each entry, after which another process finds the same
  files and ends with the same.
"""

from __future__ import annotations

from benchmarks.parts import run_parts

FIGURES = (
    *("escapes", "escape_attempts", "escapes_without"),
    *("limits_held", "limits"),
    *("leaked", "leak_kills"),
    *("lease_ms", "run_ms", "run_cpu_ms", "idle_kb_per_lease", "snapshot_ms", "at_once"),
    *("keeper_held_ms", "loop_held_ms", "walk_ms"),
    *("gateway_request_ms", "resumed_equal"),
    *("formats", "format_rewards", "format_rewards_equal", "harness_cpu_per_episode"),
)

if __name__ == "__main__":
    run_parts("sandboxes", FIGURES, description=__doc__, apart=("users",))
