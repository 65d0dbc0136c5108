"""The report on an environment: a list of checks, each with its findings and figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from agentrl.core.text import plural


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault or a warning, for the user. Faults fail the check."""

    severity: Literal["fault", "warning"]
    problem: str
    """What happened, and where."""
    advice: str = ""
    """What to do; empty if `problem` says it."""

    @property
    def text(self) -> str:
        """The problem and the advice."""
        return f"{self.problem}. {self.advice}" if self.advice else self.problem


@dataclass(slots=True)
class CheckResult:
    """The outcome of one check. A check that did not run has none."""

    name: str
    findings: list[Finding] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    """JSON data by name; a name belongs to one check."""
    shown: str = ""
    """A sentence about what was tried and had no fault."""
    remarks: list[str] = field(default_factory=list)
    """Sentences about what was left out, and what a user of the environment has to know."""

    def fault(self, problem: str, advice: str = "") -> None:
        """Report a fault."""
        self.findings.append(Finding("fault", problem, advice))

    def warn(self, problem: str, advice: str = "") -> None:
        """Report a warning."""
        self.findings.append(Finding("warning", problem, advice))

    def leave_out(self, parts: str, seconds: float, reason: str = "") -> None:
        """Say what a time limit, and another reason, left out.

        Args:
            parts: what was not played.
            seconds: the limit.
            reason: a clause with the other reason.
        """
        self.remarks.append(
            f"Left out, because the check plays for about {seconds:g} s of an idle machine{reason}: {parts}."
        )


@dataclass(slots=True)
class EnvironmentReport:
    """Result of the checker."""

    environment: str
    checks: list[CheckResult] = field(default_factory=list)
    """Checks that ran, in order."""

    def begin(self, name: str) -> CheckResult:
        """Add a check."""
        self.checks.append(CheckResult(name))
        return self.checks[-1]

    @property
    def passed(self) -> bool:
        """Whether the check found no faults."""
        return not self.findings

    @property
    def findings(self) -> list[str]:
        """Texts of the faults."""
        return [*self._texts("fault")]

    @property
    def warnings(self) -> list[str]:
        """Texts of the warnings."""
        return [*self._texts("warning")]

    @property
    def figures(self) -> dict[str, Any]:
        """The figures of all checks, by name."""
        return {name: value for check in self.checks for name, value in check.figures.items()}

    @property
    def text(self) -> str:
        """The report for a terminal."""
        if self.passed:
            shown = [check.shown for check in self.checks if check.shown]
            remarks = [remark for check in self.checks for remark in check.remarks]
            lines = [f"{self.environment}: passed", *(f"  {text}" for text in [*shown, *remarks])]
        else:
            lines = [f"{self.environment}: {plural(len(self.findings), 'finding')}"]
            lines += [f"- {text}" for text in self.findings]
        return "\n".join([*lines, *(f"WARNING {text}" for text in self.warnings)])

    def _texts(self, severity: str) -> Iterator[str]:
        return (found.text for check in self.checks for found in check.findings if found.severity == severity)
