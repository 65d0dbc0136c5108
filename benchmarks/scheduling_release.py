"""What releasing groups in parts does to the gradient: exact, in a toy in which long answers are better and slower."""

from __future__ import annotations

from tests.release_toy import (
    all_that_were_there,
    complete,
    deadline_ratios,
    dropping_the_late,
    gradient_ratio,
    gradient_variance,
    late,
    late_with_history,
)


def figures(quick: bool) -> dict[str, float | None]:
    """Expectation and variance of a group of 8 with the first 4 waited for, over those of complete leave-one-out."""
    dropped, zero = deadline_ratios()
    print(f"  gradient over the true one: late ones dropped {dropped:.3f}, rewarded with 0 {zero:.3f}", flush=True)
    print(f"    first 4 alone {gradient_ratio(dropping_the_late(4)):.3f}, late ones against all 4 ", end="")
    print(f"{gradient_ratio(all_that_were_there(4)):.3f}", flush=True)
    full = gradient_variance([complete])
    for early in () if quick else (2, 4, 6):
        print(
            f"  variance without earlier groups, m = {early}: {gradient_variance([late(early)]) / full:.2f}", flush=True
        )
    return {
        "release_gradient_ratio": gradient_ratio(late(4)),
        "gradient_variance_ratio": gradient_variance(late_with_history(4)) / full,
    }
