"""Small results that other projects published, reached here: `python -m benchmarks.anchors`.

Each anchor is an environment and TOML files of a user, in this folder or in examples/, trained by `agentrl train` with
several seeds. A record of a run has its command, the held-out rewards with their intervals, CPU seconds, peak memory,
and a digest of the run directory. A run that was stopped is resumed; a run in the results is not repeated.

* `anchors_runs`: runs in the results, of the chosen anchors;
* `anchors_improved`: runs whose last held-out interval lies above the first.

    python -m benchmarks.anchors --output docs/anchors.json    # all runs that are missing
    python -m docs.generators.anchors                          # docs/results/anchors.md
"""
