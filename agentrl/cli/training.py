"""`agentrl train` and `agentrl evaluate`: from a file to a finished run."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import itertools
import re
import shlex
import signal
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.cli.output import INTERRUPTED, end_as_interrupted_on_signals, ignore_stop_signals, print_json
from agentrl.config.load import dump_toml, load, setting_place, setting_sources
from agentrl.core.errors import EnvironmentDefinitionError, InputError
from agentrl.core.files import expand_path
from agentrl.core.masking import mask_secrets
from agentrl.core.text import escape_line, plural
from agentrl.observe.progress import ProgressLine

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence

    from agentrl.app.resume import ReopenedRun
    from agentrl.app.training import Run
    from agentrl.config.load import SettingSources
    from agentrl.config.run import RunConfig


def train(options: argparse.Namespace) -> int:
    """`agentrl train FILE [--section.field=value …] [--model DIR] [--resume] [--dry-run]`."""
    if _is_address(options.model):
        raise InputError(
            f"--model {options.model}: a policy behind an endpoint cannot be trained, only evaluated; give the "
            "directory of a model"
        )
    config = _config(options)
    sources = setting_sources(options.file, options.overrides)
    # What can be refused is refused before the slower imports.
    reopened: ReopenedRun | None = None
    if options.resume:
        from agentrl.app.resume import reopen_run

        reopened = reopen_run(config, Path(config.directory) / config.name, sources)
        config = reopened.config
    else:  # a run keeps models that it began with
        from agentrl.app.hub import check_local_models
        from agentrl.app.resume import check_free

        check_local_models(config)
        check_free(Path(config.directory, config.name))
    _import_environment(options, config, is_plan=options.dry_run)
    if options.dry_run:
        return _print_plan(config, {} if reopened is None else reopened.before, as_json=options.json)
    with contextlib.suppress(ValueError, OSError):  # raised for streams without a descriptor
        faulthandler.enable()  # a crash in native code then prints the Python stack
    run = _run_training(config, sources, options, reopened)
    policies = {policy: str(path) for policy, path in run.policies.items()}
    if options.json:
        print_json({"path": str(run.path), "summary": run.summary, "metrics": run.metrics, "policies": policies})
    else:
        for policy, path in policies.items():
            sys.stdout.write(f"{escape_line(policy)}: {escape_line(path)}\n")
    if run.interrupted:
        _say_how_to_go_on(options)
        return INTERRUPTED
    return 0


def _import_environment(options: argparse.Namespace, config: RunConfig, *, is_plan: bool = False) -> None:
    """Import the environment before slow work. An error names the line that configures it. A dry run does not require
    the training packages."""
    from agentrl.app.run_parts import check_packages_of_run, environment_of, let_waiting_threads_sleep
    from agentrl.environment.registry import resolve

    if not is_plan:
        check_packages_of_run(config)
    let_waiting_threads_sleep(config)
    for name in [config.environment.id] if isinstance(config.environment.id, str) else config.environment.id:
        try:
            resolve(name)
        except EnvironmentDefinitionError as error:
            place = setting_place(Path(expand_path(options.file)), "environment.id", Path(name).name)
            raise EnvironmentDefinitionError(f"{place}: {error}") from error
    environment_of(config)


def _print_plan(config: RunConfig, before: Mapping[str, Any], *, as_json: bool) -> int:
    """Print the settings of a run and what follows from them; `before`: those with which it was started."""
    from agentrl.app.hub import check_hub_models
    from agentrl.app.model_files import model_paths
    from agentrl.app.plan import resolve, with_chosen_engine, with_learning_rates
    from agentrl.app.run_parts import environment_of
    from agentrl.app.scoring import expected_scores
    from agentrl.app.user_functions import load_user_functions

    functions = load_user_functions(config.trainer, config.credit, config.scorers, config.trained)
    with contextlib.suppress(ImportError):  # nothing that finds models on the hub is installed
        check_hub_models(model_paths(config), before)
    config = with_learning_rates(config, before)
    config, line = with_chosen_engine(config, before)
    plan = resolve(config, environment_of(config))
    for warning in plan.warnings(whole_groups=functions.compares_in_step):
        sys.stderr.write(f"WARNING {escape_line(warning)}\n")
    lines = [*plan.lines(), *([line] if line else []), *expected_scores(config)]
    if as_json:
        print_json(mask_secrets({**config.model_dump(mode="json"), "plan": lines}))
    else:
        sys.stdout.write(dump_toml(config))
        sys.stdout.writelines(f"# {escape_line(line)}\n" for line in lines)
    return 0


def _run_training(
    config: RunConfig, sources: SettingSources, options: argparse.Namespace, reopened: ReopenedRun | None
) -> Run:
    """Train. After an interruption, further signals change nothing."""
    from agentrl.app.stops import STOP_LIMIT
    from agentrl.app.training import train as run_training

    path = Path(config.directory, config.name).absolute()
    atexit.register(STOP_LIMIT.end_process)
    before = end_as_interrupted_on_signals()  # for the moments in which the run does not handle them
    try:
        run = run_training(config, resume=reopened or False, sources=sources)
    except KeyboardInterrupt:
        ignore_stop_signals()
        if path.is_dir():
            _say_how_to_go_on(options)
        STOP_LIMIT.resume()
        raise
    except BaseException:
        _restore_handlers(before)
        raise
    if run.interrupted:
        ignore_stop_signals()
        STOP_LIMIT.resume()
    else:
        _restore_handlers(before)
    return run


def _restore_handlers(handlers: Mapping[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        if handler is not None:  # None: C code has set it
            signal.signal(number, handler)


def train_arguments(options: argparse.Namespace) -> list[str]:
    """Return the arguments of `agentrl train` with the file, model and overrides of a command."""
    model = [] if options.model is None else ["--model", str(options.model)]
    return ["train", str(options.file), *model, *override_arguments(options)]


def override_arguments(options: argparse.Namespace) -> list[str]:
    """Return the overrides of a command as its arguments."""
    return [f"--{override.lstrip('-')}" for override in options.overrides]


def _say_how_to_go_on(options: argparse.Namespace) -> None:
    """Print the command that resumes this run."""
    command = shlex.join(["agentrl", *train_arguments(options), "--resume"])
    sys.stderr.write(f"stopped; to continue: {escape_line(command)}\n")


def demo(options: argparse.Namespace) -> int:
    """`agentrl demo [EXAMPLE] [--section.field=value …] [--resume] [--dry-run]`: run an example in `runs/demo`."""
    from agentrl.config.fields import shipped_example

    options.file, options.model = shipped_example(options.example), None
    options.overrides = ["name=demo", *options.overrides]
    return train(options)


def evaluate(options: argparse.Namespace) -> int:
    """`agentrl evaluate FILE [--section.field=value …] [--model URL[,NAME]] [--policy [NAME=]DIR …] [--tasks N]
    [--journal DIR] [--against [NAME=]DIR|base]`."""
    if options.against and _is_address(options.model):
        raise InputError(
            "--against loads weights into an engine, and --model names an endpoint, which has its own: remove one of "
            "the two"
        )
    if options.policy and _is_address(options.model):
        raise InputError(
            "--policy loads weights into an engine, and --model names an endpoint, which has its own: remove one of "
            "the two"
        )
    if options.tasks is not None:
        options.overrides.append(f"evaluation.tasks={options.tasks}")
    config = _config(options)
    _import_environment(options, config)
    journal = options.journal or _new_run(
        Path(config.directory), config.name, options.model if _is_address(options.model) else ",evaluate"
    )
    compared_journal = journal.with_name(f"{journal.name}-compared")
    other_weights = _weights(options.against) if options.against and options.against != ["base"] else None
    if options.against and (compared_journal / "journal").exists():  # refused before the first evaluation
        raise InputError(
            f"--against writes its episodes to {compared_journal}, which has a journal: remove it, or set --journal"
        )
    from agentrl.app.evaluation import evaluate as run_evaluation
    from agentrl.observe.metrics import interval_metric

    with (
        _warnings_as_lines(),
        contextlib.closing(ProgressLine("evaluating", sys.stderr)) as progress,
    ):

        def on_progress(num_ended: int, episodes: int) -> None:
            progress.phase("playing")
            progress(f"{num_ended} of {plural(episodes, 'episode')}", num_ended / max(episodes, 1))

        progress("starting")
        reports: Any = {"on_progress": on_progress, "on_phase": progress.phase}
        others = run_evaluation(config, other_weights, journal=compared_journal, **reports) if options.against else None
        evaluation = run_evaluation(config, _weights(options.policy), journal=journal, **reports)
        metrics, verdict = dict(evaluation), ""
        if others is not None:
            metrics |= {name.replace("evaluation/", "compared/", 1): value for name, value in others.items()}
            differences = evaluation.compared_with(others)
            metrics |= differences
            verdict = evaluation.verdict(differences)
    if options.json:
        print_json({**metrics, **({"verdict": verdict} if verdict else {}), "path": str(journal)})
        return 0
    width = max(map(len, metrics), default=0)
    intervals = {interval_metric(name) for name in metrics}
    for name, value in metrics.items():
        if name not in intervals:
            error = metrics.get(interval_metric(name))
            interval = "" if error is None else f" ± {error:.4g}"
            sys.stdout.write(f"{escape_line(name):<{width}}  {value:.4g}{interval}\n")
    if verdict:
        names = [escape_line(", ".join(weights) or "base") for weights in (options.policy, options.against)]
        against = "against" if verdict == "undecided" else "than"
        sys.stdout.write(
            f"{names[0]} is {verdict} {against} {names[1]}: {metrics['difference/reward']:+.3f}, between "
            f"{metrics['difference/reward_low']:+.3f} and {metrics['difference/reward_high']:+.3f}, over "
            f"{plural(metrics['difference/tasks'], 'task')}\n"
        )
    journal_name = escape_line(str(journal))
    sys.stdout.write(f"{journal_name}: view it with `agentrl episode list {journal_name}`\n")
    return 0


@contextlib.contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Print warnings as `train` does, without the place in the code."""

    def show(message: Warning | str, *place: object) -> None:
        sys.stderr.write(f"WARNING {escape_line(str(message))}\n")

    with warnings.catch_warnings():
        warnings.filterwarnings("always", module=r"agentrl\.")  # a line, also where Python makes warnings errors
        warnings.showwarning = show  # type: ignore[assignment]
        yield


def _is_address(model: str | None) -> bool:
    return model is not None and model.startswith(("http://", "https://"))


def _new_run(directory: Path, run: str, model: str) -> Path:
    """Return a new directory for the episodes of an endpoint's model next to the run's."""
    name = re.sub(r"[^\w.-]+", "-", f"{run}-{model.partition(',')[2] or 'endpoint'}", flags=re.ASCII)[:60]
    candidates = (f"{name}-{number}" if number > 1 else name for number in itertools.count(1))
    return next(path for candidate in candidates if not (path := directory / candidate).exists())


def _weights(arguments: Sequence[str]) -> str | dict[str, str] | None:
    """Parse the weights of `--policy DIR`, or of several `--policy NAME=DIR`."""
    if len(arguments) == 1 and ("=" not in arguments[0] or Path(arguments[0]).exists()):
        return arguments[0]
    pairs = [text.partition("=") for text in arguments]
    if any(not (name and directory) for name, _, directory in pairs):
        raise InputError("--policy: several policies are given; write NAME=DIR for each")
    return {name: directory for name, _, directory in pairs} or None


def _config(options: argparse.Namespace) -> RunConfig:
    overrides = list(options.overrides)
    if _is_address(options.model):
        from agentrl.app.evaluation import find_remote_policy

        return load(options.file, overrides, endpoint=find_remote_policy(options.model, options.api_key_env))
    if options.model is not None:
        overrides.append(model_override(options.model))
    return load(options.file, overrides)


def model_override(model: str) -> str:
    """Return the override that `--model DIR` stands for.

    Raises:
        InputError: it is the address of an endpoint.
    """
    from agentrl.app.hub import is_hub_name

    if _is_address(model):
        raise InputError(f"--model {model}: is an endpoint; give the directory of a model")
    return f"model.path={model if is_hub_name(model) else Path(model).resolve()}"
