"""The first look at the directory of a run: whether a new run may start there, or with which settings one resumes, and
whether it has steps left. Imports little, so that what cannot start or be resumed is refused at once."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel

from agentrl.app.hub import is_hub_name
from agentrl.app.model_files import with_kept_models
from agentrl.config.load import SettingDifference, SettingSources, changed_config, check_settings_unchanged, overlap
from agentrl.core.control_messages import read_actions
from agentrl.core.errors import InputError, JournalError, RunDirectoryError
from agentrl.core.setting_paths import value_at
from agentrl.core.text import plural
from agentrl.inspection.reader import RunReader
from agentrl.journal.run_log import SqliteRunLog
from agentrl.journal.run_process import RunProcessRecord, find_writing_process, is_writer_dead, read_process_state
from agentrl.journal.schema import CONTROL_FILE
from agentrl.observe.run_directory import FILES_OF_A_START, RunDirectory

if TYPE_CHECKING:
    from agentrl.config.run import RunConfig


class ReopenedRun(NamedTuple):
    """A run that is to be resumed."""

    config: RunConfig
    """Its configuration, with the models that the run has kept and what `agentrl run set` changed."""
    configured: Mapping[str, Any]
    """Data of the configuration without these changes, and without the settings of the command line."""
    conclusion: str = ""
    """A sentence for the user if the run has ended and has no step left."""
    before: Mapping[str, Any] = MappingProxyType({})
    """Data of the configuration with which it was started; empty if it ended before it had chosen its settings."""


def reopen_run(config: RunConfig, path: Path, sources: SettingSources) -> ReopenedRun:
    """Read what a resume of a run starts from.

    Raises:
        RunDirectoryError: the directory contains no run.
        JournalError: the journal is damaged, or something in the directory is a link, a pipe or a device.
        InputError: the configuration has fewer steps than the run has taken, so the rest would be lost; or a setting
            differs that must not.
    """
    directory, configured = RunDirectory.reopen(path), sources.configured(config)
    config = with_kept_models(config, path, RunDirectory.config(path))
    if not (directory.journal / CONTROL_FILE).is_file():  # the run ended before it had a journal
        return ReopenedRun(config, configured)
    with contextlib.closing(RunReader(path)) as reader:
        info, recorded, newest = reader.info(), reader.config(), reader.log.newest_steps()
    live = with_recorded_changes(config, info, sources)
    if "bases" in info:  # else the run ended before it had chosen its settings
        check_settings_unchanged(recorded, live, _is_open)
    for name in live.trained:
        key = ("steps",) if isinstance(live.steps, int) else ("steps", name)
        steps, before, taken = live.steps_of(name), value_at(recorded, *key), newest.get(name, 0)
        if isinstance(before, int) and steps < min(before, taken):
            option, of_policy = ".".join(key), f" of {name}" if len(live.trained) > 1 else ""
            place = f"{option} is {steps} in {sources.file}"
            if any(overlap(key, path) for path in sources.named):
                place = f"--{option}={steps} is less"
            elif live.steps_of(name) != config.steps_of(name):
                place = f"{option} was set to {steps} by `agentrl run set`"
            raise InputError(
                f"the run has taken {plural(taken, 'step')}{of_policy}; {place}: add --{option}={before} (what it ran "
                f"with), or {'a larger number' if before <= taken else f'another number of at least {taken}'}"
            )
    before = recorded if "bases" in info else {}
    counts = {name: newest.get(name, 0) for name in live.trained}
    is_over = counts and all(count >= live.steps_of(name) for name, count in counts.items())
    if not is_over or read_process_state(path) != "finished":
        return ReopenedRun(live, configured, before=before)
    steps_taken = f"{min(counts.values())} steps"
    if len(set(counts.values())) > 1:
        steps_taken = f"steps ({', '.join(f'{count} of {name}' for name, count in counts.items())})"
    conclusion = f"the run has taken all {steps_taken}: nothing is left to do (--steps=M for more)"
    return ReopenedRun(live, configured, conclusion, before)


def check_free(path: Path) -> None:
    """Check that a run can be created at a path; a start that failed before it recorded anything does not count.

    Raises:
        RunDirectoryError: something exists there, such as a run that is running.
    """
    if (process := find_writing_process(path / "journal")) is not None:
        raise RunDirectoryError(
            f"{path} is running, in process {process}: `agentrl run view {path}` shows it, and `kill -INT {process}` "
            "stops it; choose another --name for a new run"
        )
    if not _is_failed_start(path):
        RunDirectory.check_free(path)


def remove_failed_start(path: Path) -> None:
    """Remove the directory of a failed start, so that a new run can take its place."""
    if _is_failed_start(path):
        shutil.rmtree(path, ignore_errors=True)


def _is_failed_start(path: Path) -> bool:
    """Whether a directory has only what a run leaves that ended with an error, or was stopped, before its first
    version: nothing that a later start could need."""
    state = RunProcessRecord.read(path).state
    if state not in ("failed", "stopped") and not (state == "running" and is_writer_dead(path)):
        return False
    try:
        if any(entry.name not in FILES_OF_A_START for entry in path.iterdir()):
            return False
        with contextlib.closing(SqliteRunLog(path / "journal")) as log:
            return not log.starts() and log.span() is None
    except (OSError, JournalError):
        return False


def _is_open(difference: SettingDifference) -> bool:
    """Whether a setting may still be chosen by the model, or a model's directory be found from its name."""
    now = difference.now
    return not difference.is_set or not now or (isinstance(now, str) and is_hub_name(now))


def with_recorded_changes(config: RunConfig, info: Mapping[str, Any], sources: SettingSources) -> RunConfig:
    """Return the configuration of a resume with the settings that `agentrl run set` changed.

    The newest change of a setting holds unless the command line names the setting, or its value in the configuration
    has changed since.

    Args:
        config: configuration of the resume.
        info: info of the run.
        sources: where its settings come from.
    """
    configured = sources.configured(config)
    changes = {action.path: action for action in read_actions(info) if action.act == "set"}
    for path, action in changes.items():
        if value_at(configured, *path) != action.configured or any(overlap(path, key) for key in sources.named):
            continue
        with contextlib.suppress(InputError):  # recorded by another version, or by someone else
            new, differences = changed_config(config, path, action.now)
            if all(change.path == path and change.rule.is_live for change in differences):
                # Not all of `new`, in which every setting counts as set by the user.
                first, *rest = path
                value, section = getattr(new, first), getattr(config, first)
                if isinstance(section, BaseModel):
                    value = section.model_copy(update={rest[0]: getattr(value, rest[0])})
                config = config.model_copy(update={first: value})
    return config
