"""Crash points: every transaction and every file operation of a small run, under four fates, and six mutants.

`crash_points`: operations of a run of 12 episodes, 3 turns, 2 seats, two policies. `violations`: promises broken by a
crash at any of them, by a crash of a recovery, or by an engine that fails after the crash. `mutants_caught`: of six
protocols, each with one rule broken, how many the same enumeration notices. Quick: every eighth crash point.
"""

from __future__ import annotations

from agentrl.core.clock import SystemClock
from tests.sim.crash_cases import MUTANTS, FailingEngine, Talk
from tests.support.crash_scenario import CrashScenario
from tests.support.crashes import CrashReport, crash_everywhere


def figures(quick: bool) -> dict[str, float | None]:
    """See the module."""
    share = 8 if quick else 1
    reports: dict[str, CrashReport] = {}
    started = SystemClock().monotonic()
    reports["four fates"] = crash_everywhere(CrashScenario(Talk), share=share)
    seconds = SystemClock().monotonic() - started
    reports["engine failing after the crash"] = crash_everywhere(FailingEngine(Talk), share=share)
    reports["recovery crashed everywhere"] = crash_everywhere(
        CrashScenario(Talk), where="rename", every_recovery=True, share=share
    )
    for name, report in reports.items():
        print(f"  {name}: {report}")
    print(f"  the four fates took {seconds:.1f} s")
    caught = 0
    for mutant, rule in MUTANTS.items():
        report = crash_everywhere(mutant(Talk), share=5, enough=1)
        noticed = any(violation.what.startswith(f"{rule}: ") for violation in report.violations)
        caught += noticed
        print(f"  {mutant.__name__}: {report.violations[0] if noticed else 'NOT NOTICED'}"[:200])
    return {
        "crash_points": len(reports["four fates"].operations),
        "violations": sum(len(report.violations) for report in reports.values()),
        "mutants_caught": caught,
    }
