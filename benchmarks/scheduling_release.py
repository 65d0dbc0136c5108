"""What releasing groups in parts does to the gradient: exact, in a toy in which long answers are slower."""

from __future__ import annotations

from tests.release_toy import (
    APART,
    REWARDS,
    SPEED,
    all_that_were_there,
    complete,
    deadline_ratios,
    dropping_the_late,
    gradient_ratio,
    gradient_variance,
    late,
    late_with_history,
)

SPEEDS = {"long five times slower": SPEED, "long after all short": APART}


def figures(quick: bool) -> dict[str, float | None]:
    """Expectation and variance of a group of 8 with the first 4 waited for, over those of complete leave-one-out."""
    dropped, zero = deadline_ratios()
    print(f"  gradient over the true one: late ones dropped {dropped:.3f}, rewarded with 0 {zero:.3f}", flush=True)
    print(f"    first 4 alone {gradient_ratio(dropping_the_late(4)):.3f}, late ones against all 4 ", end="")
    print(f"{gradient_ratio(all_that_were_there(4)):.3f}", flush=True)
    if not quick:
        variances()
        own_slots()
    full = gradient_variance([complete])
    apart = {"reward": REWARDS["the length (1, 0)"], "speed": APART}
    return {
        "release_gradient_ratio": gradient_ratio(late(4)),
        "gradient_variance_ratio": gradient_variance(late_with_history(4)) / full,
        "gradient_variance_worst": gradient_variance([late(4)], **apart) / gradient_variance([complete], **apart),
        "gradient_ratio_own_slots": min(gradient_ratio(late(4), slots=slots, speed=APART) for slots in range(1, 9)),
    }


def variances() -> None:
    """The variance of the gradient over that of leave-one-out with all 8, without and with six earlier groups."""
    for slower, speed in SPEEDS.items():
        for name, reward in REWARDS.items():
            full = gradient_variance([complete], reward=reward, speed=speed)
            told = []
            for early in (2, 4, 6):
                without = gradient_variance([late(early)], reward=reward, speed=speed) / full
                history = late_with_history(early, reward=reward)
                with_it = gradient_variance(history, reward=reward, speed=speed) / full
                told.append(f"m = {early}: {without:.2f}, {with_it:.2f} with earlier groups")
            print(f"  variance, {slower}, reward {name}: {'; '.join(told)}", flush=True)


def own_slots() -> None:
    """The gradient over the true one where the group's 8 members have slots of their own, which hold each other up."""
    for slower, speed in SPEEDS.items():
        ratios = [f"{slots}: {gradient_ratio(late(4), slots=slots, speed=speed):.3f}" for slots in range(1, 9)]
        print(f"  gradient on own slots, {slower}: {', '.join(ratios)}", flush=True)
