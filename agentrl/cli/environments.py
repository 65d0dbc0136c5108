"""`agentrl env …`: which environments there are, and whether one can be trained on."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
from typing import TYPE_CHECKING, Any

from agentrl.cli.apart import run_apart
from agentrl.cli.output import print_json
from agentrl.core.errors import AgentRLError, CheckFailedError, InputError
from agentrl.core.safe import safe, safe_line
from agentrl.core.words import plural

if TYPE_CHECKING:
    import argparse

    from agentrl.environment.registry import EnvironmentSpec


def env_list(options: argparse.Namespace) -> int:
    """`agentrl env list`."""
    from agentrl.environment.registry import registered

    found = [_described(spec) for spec in registered()]
    if options.json:
        print_json(found)
        return 0
    width = max((len(line["id"]) for line in found), default=0)
    for line in found:
        about = f"cannot be used: {line['error']}" if line["error"] else line["description"]
        sys.stdout.write(f"{safe_line(line['id']):<{width}}  {safe_line(about)}\n")
        seats = f"; seats: {', '.join(line['seats'])}" if line["seats"] else ""
        sys.stdout.write(f"{'':<{width}}  from {safe_line(line['entry_point'] + seats)}\n")
    if not found:
        sys.stdout.write("no environments are installed; write one with `agentrl env new NAME`\n")
    return 0


def env_check(options: argparse.Namespace) -> int:
    """`agentrl env check ID`; exit code 1 where a check failed."""
    from agentrl import check_environment
    from agentrl.observe.progress import Part

    progress = Part(f"checking {options.id}", sys.stderr)

    def check() -> tuple[bool, str | None, str]:
        report = check_environment(options.id, on_progress=progress, hash_order=True)
        return report.passed, report.resume_class, report.text

    with contextlib.closing(progress):
        answer, problem = run_apart(check, meanwhile=contextlib.nullcontext())
    passed, resume_class, text = answer or (False, None, f"{options.id}: the check came to no end: {problem}")
    if options.json:
        print_json({"id": options.id, "passed": passed, "class": resume_class, "text": text})
    else:
        sys.stdout.write(safe(text).rstrip("\n") + "\n")
    return 0 if passed else CheckFailedError.exit_code


def env_warm_up(options: argparse.Namespace) -> int:
    """`agentrl env warm-up ID --out DIR [--demonstrations FILE.jsonl] [--steps N] [--early SHARE] [--until SHARE]`."""
    from agentrl.app.warm_up import warm_up
    from agentrl.observe.progress import Part

    if options.steps < 1:
        raise InputError("--steps is at least 1")
    with contextlib.closing(Part(f"warming up {options.out}", sys.stderr)) as progress:
        made = warm_up(
            options.id,
            options.out,
            demonstrations=options.demonstrations,
            steps=options.steps,
            early=options.early,
            until=options.until,
            seed=options.seed,
            on_progress=progress,
        )
    if options.json:
        print_json({**dataclasses.asdict(made), "path": str(made.path)})
        return 0
    wanted = "" if made.demonstrated is None else f"; the demonstrations earn {made.demonstrated:.3f}"
    path = safe_line(str(made.path))
    sys.stdout.write(
        f"{path}: {made.parameters:,} parameters, {made.vocabulary} tokens, {plural(made.steps, 'supervised step')}\n"
        f"held-out reward {made.before:.3f} before, {made.reward:.3f} after{wanted}\n"
        f"learn on by reward: agentrl train {path}/train.toml\n"
    )
    return 0


def _described(spec: EnvironmentSpec) -> dict[str, Any]:
    from agentrl.environment.registry import resolve

    line: dict[str, Any] = {"id": spec.id, "entry_point": spec.entry_point, "description": "", "seats": [], "error": ""}
    try:
        environment = resolve(spec.id)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code: one that cannot be imported hides no other
        kind = "" if isinstance(error, AgentRLError) else f"{type(error).__name__}: "
        return {**line, "error": f"{kind}{error}"}
    description = (inspect.getdoc(environment) or "no docstring").splitlines()[0]
    return {**line, "description": description, "seats": list(environment.seats)}
