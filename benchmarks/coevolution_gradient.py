"""How far a policy's gradient moves when a step is split, packed, resumed or distributed, in float32; and whether its
update moves at all when another policy is there."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from tests.gradient_cases import Error, update_beside, worst_error
from tests.learn_cases import write_model


def figures(quick: bool) -> dict[str, float | None]:
    """The worst error of both policies over all ways, of 3 or 30 sets of episodes.

    It is relative to the sizes of the gradients that a step adds up. Relative to their sum, which cancels where units
    pull in different directions, it is printed beside. What is left is float32's rounding of a token's own forward and
    backward pass, which depends on the shapes it is computed in: half of it in attention. Sums of tokens and units in
    float64 do not make it smaller (seen); attention in float64 halves it, at more than twice the price of attention.
    """
    found: dict[str, list[Error]] = {}
    seeds, same = 3 if quick else 30, 0
    with TemporaryDirectory() as directory:
        model = write_model(Path(directory) / "model")
        for seed in range(seeds):
            alone, beside = (
                update_beside(model, Path(directory) / f"{seed}-{there}", seed, beside=there) for there in (False, True)
            )
            same += alone == beside
            for way, error in worst_error(model, Path(directory) / str(seed), seed).items():
                found.setdefault(way, []).append(error)
    print(f"  a policy's update with another there is the same bit for bit with {same} of {seeds} seeds", flush=True)
    for way, errors in found.items():
        of_sum = sorted(error.of_sum for error in errors)
        worst = max(error.of_terms for error in errors)
        print(
            f"  {way}: {worst:.1e} of the terms; of their sum {median(of_sum):.1e}, worst {of_sum[-1]:.1e}", flush=True
        )
    return {"gradient_split_error": max(error.of_terms for errors in found.values() for error in errors)}
