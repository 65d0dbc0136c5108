"""`python -m agentrl.environments.signalling RUN [--every 50]`: the code of a run's speaker, version by version."""

from __future__ import annotations

import argparse
import sys

import agentrl
from agentrl.environments.signalling.env import STATES, WORDS, mutual_information, read_code


def main() -> int:
    """Print how much each version's words say, and the last code as a table."""
    parser = argparse.ArgumentParser(prog="python -m agentrl.environments.signalling", description=__doc__)
    parser.add_argument("run", help="directory of a run of the signalling game")
    parser.add_argument("--every", type=int, default=50, help="number of steps between two versions")
    options = parser.parse_args()
    try:
        with agentrl.open_run(options.run) as run:
            last = max((value.step for value in run.metrics("reward/mean")), default=1) - 1
            for step in sorted({*range(0, last + 1, options.every), last}):
                code = read_code(run, step)
                print(f"version {step}: {mutual_information(code):.2f} bits")
    except agentrl.AgentRLError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print("state", *WORDS, sep="   ")
    for state in STATES:
        print(f"{state}    ", *(f"{100 * code[state, word]:3.0f}" for word in WORDS), "%")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
