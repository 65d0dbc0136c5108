"""Tasks of Harbor: directories with task.toml, instruction.md, environment/ and tests/. Its package is not needed.

The policy has a shell in a sandbox that is made as the Dockerfile says. After its answer, the tests run in a second
sandbox over the files it left, and write the reward. What an image would have to be built for is refused, by line.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import glob
import json
import math
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from posixpath import dirname, join, normpath
from typing import Any

from agentrl import EpisodeContext, Sandbox, Task, TaskSource, ToolEnvironment, ToolEpisode, bash
from agentrl.formats import (
    EffectError,
    EnvironmentDefinitionError,
    EpisodeError,
    EpisodeSandbox,
    InputError,
    Network,
    Split,
    check_variables,
    copy_refusals,
    expand_path,
    open_regular,
    read_sources,
    split_tasks,
)

MACHINE = "/"
"""Root directory of tasks that may use this machine's /usr in place of an image."""
TESTS, VERDICT = "/tests", "/logs/verifier"
DISK_MB = 256
"""Size of the files of a task, which are in memory, in MiB."""
_VERDICT_BYTES = 65_536
_TEXT_BYTES = 1 << 20
_NUMBER = re.compile(rb"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
"""A number in reward.txt; Python would also read `0_1`."""
_NEEDS_NETWORK = re.compile(
    r"\b(?:apt-get|apt|apk|dnf|yum) +(?:-\S+ +)*(?:install|update|add)\b|\b(?:curl|wget|uvx|npx)\b"
    r"|\bpip3? +install\b|\buv +(?:pip|run|tool|sync|add)\b|\bnpm +(?:i|install|ci)\b|\bgit +clone\b"
)
_HARMLESS = ("LABEL", "MAINTAINER", "CMD", "ENTRYPOINT", "EXPOSE", "STOPSIGNAL")
"""Instructions without an effect on what a shell in the container sees."""
_DIRECTORIES = ("/", "/bin", "/etc", "/home", "/mnt", "/opt", "/root", "/srv", "/tmp", "/usr", "/usr/local", "/var")
"""Directories of every image."""
_REFUSED_FIELDS = {
    ("steps",): "tasks of several steps",
    ("environment", "gpus"): "GPUs in a sandbox",
    ("environment", "tpu"): "TPUs in a sandbox",
    ("environment", "mcp_servers"): "servers beside the task",
    ("environment", "healthcheck"): "processes that outlive a command",
    ("environment", "skills_dir"): "skills of the agent",
    ("environment", "allowed_hosts"): "a list of hosts",
    ("agent", "allowed_hosts"): "a list of hosts",
    ("verifier", "allowed_hosts"): "a list of hosts",
    ("verifier", "environment"): "another environment for the tests",
    ("verifier", "collect"): "services beside the task",
}
"""Fields of task.toml that cannot be honored, and what they ask for."""


@dataclass(slots=True)
class HarborTask:
    """A task directory, as far as it can be honored."""

    instruction: str = ""
    image: str = ""
    workdir: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    copies: list[tuple[str, Path]] = field(default_factory=list)
    """Absolute path in the sandbox of each file and directory of the task; later ones replace earlier ones."""
    directories: list[str] = field(default_factory=list)
    """Directories that WORKDIR makes."""
    memory_mb: int = 512
    tests_s: float = 600.0
    """Time limit of the tests, in seconds."""
    tests_variables: dict[str, str] = field(default_factory=dict)
    refusals: list[str] = field(default_factory=list)
    """What cannot be honored, each with its file and line."""

    def sandbox(self, root: str, network: Network) -> Sandbox:
        """Return the sandbox of the task over a root directory. No spelling of `/` is the whole disk."""
        root = MACHINE if os.path.realpath(root) == "/" else root
        directory = self.workdir or "/box"
        copied = {path if source.is_dir() else str(Path(path).parent) for path, source in self.copies}
        made = {directory, *self.directories, TESTS, VERDICT} - {"/"} | (copied if root == MACHINE else copied - {"/"})
        return Sandbox(
            memory_mb=self.memory_mb,
            seconds=self.tests_s,
            disk_mb=DISK_MB,
            network=network,
            root=None if root == MACHINE else root,
            writable=tuple(sorted(made)),
            directory=directory,
            environment=self.variables,
        )


def read_task(directory: Path, roots: Mapping[str, str], *, network: Network = "none") -> HarborTask:
    """Read a task directory; `HarborTask.refusals` is empty if it can be played.

    Args:
        directory: the task directory.
        roots: directories with the file systems of images, by the image's name, or by the name of the task directory if
            it is the image that its Dockerfile builds; `/` is this machine's /usr.
        network: the sandbox's network.
    """
    task = HarborTask(refusals=_links_out(directory))
    if task.refusals:
        return task
    try:
        settings = tomllib.loads(_text(directory / "task.toml"))
    except (OSError, ValueError, RecursionError) as error:
        task.refusals.append(f"{directory / 'task.toml'}: {error}")
        return task
    try:
        _read_settings(task, settings, directory / "task.toml")
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        task.refusals.append(f"{directory / 'task.toml'}: {error}")
    try:
        task.instruction = _text(directory / "instruction.md")
    except (OSError, ValueError) as error:
        task.refusals.append(f"{directory / 'instruction.md'}: {error}")
    _read_tests(task, directory / "tests", network)
    environment, is_built = directory / "environment", directory.name in roots
    dockerfile, refused = environment / "Dockerfile", len(task.refusals)
    for extra in ("docker-compose.yaml", "docker-compose.yml"):
        if (environment / extra).exists():
            task.refusals.append(f"{environment / extra}: several services are not supported")
    if dockerfile.exists():
        _Dockerfile(task, environment, roots, is_built=is_built).read()
    if is_built:
        task.image = directory.name
    if not task.image:
        if len(task.refusals) == refused:
            task.refusals.append(
                f"{dockerfile}: it names no image (there is none, or no FROM), and task.toml names no docker_image"
            )
    elif task.image not in roots:
        task.refusals.append(
            f"{dockerfile}: needs the image {task.image}; give a directory with its files in `roots`, or {MACHINE!r} "
            "there for this machine's /usr"
        )
    _check_sandbox(task, directory, roots, network)
    return task


def _check_sandbox(task: HarborTask, directory: Path, roots: Mapping[str, str], network: Network) -> None:
    """Refuse what no sandbox can hold or have."""
    sources = (directory / "tests", *(source for _, source in task.copies))
    for source in dict.fromkeys(sources):
        task.refusals += copy_refusals(source)
    size = sum(map(_size, sources))
    if size > DISK_MB << 20:
        task.refusals.append(f"{directory}: its files have {size >> 20:,} MiB; at most {DISK_MB} fit the sandbox")
    if not task.refusals:
        try:
            task.sandbox(roots[task.image], network)
            check_variables(task.tests_variables)
        except InputError as error:
            task.refusals.append(f"{directory}: {error}")


def _text(path: Path) -> str:
    """Read a text file of a task.

    Raises:
        OSError: it cannot be read, is no plain file, or is too long.
        UnicodeDecodeError: it is not UTF-8.
    """
    with open_regular(path.resolve()) as file:
        content = file.read(_TEXT_BYTES + 1)
    if len(content) > _TEXT_BYTES:
        raise OSError(errno.EFBIG, f"longer than {_TEXT_BYTES:,} bytes")
    return content.decode()


def _size(path: Path) -> int:
    """Return the size of the plain files that `read_sources` reads, in bytes."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file() and not file.is_symlink())


def _links_out(directory: Path) -> list[str]:
    """Refuse links that would show the policy, or its tests, files of this machine."""
    names = ("task.toml", "instruction.md", "environment", "environment/Dockerfile", "tests", "tests/test.sh")
    paths = [directory / name for name in names]
    return [f"{path}: a link leads out of the task" for path in paths if not _is_inside(path, directory)]


def _is_inside(path: Path, top: Path) -> bool:
    """Whether a path, with all links followed, is in a directory; no path in a loop of links is."""
    try:
        return path.resolve().is_relative_to(top.resolve())
    except (OSError, RuntimeError):
        return False


def _read_settings(task: HarborTask, settings: dict[str, Any], path: Path) -> None:
    """Read task.toml.

    Raises:
        TypeError, ValueError, AttributeError, OverflowError: a field has the wrong type, or its number is too large.
    """
    for keys, what in _REFUSED_FIELDS.items():
        value: Any = settings
        for key in keys:
            value = value.get(key)
            if value is None:
                break
        if value:
            task.refusals.append(f"{path}: {'.'.join(keys)}: {what} are not supported")
    environment, verifier = settings.get("environment", {}), settings.get("verifier", {})
    for name in ("agent", "verifier"):
        if settings.get(name, {}).get("user") not in (None, "root", 0):
            task.refusals.append(f"{path}: {name}.user: another user than root is not supported")
    if str(environment.get("os", "linux")).lower() != "linux":
        task.refusals.append(f"{path}: environment.os: only linux is supported")
    if verifier.get("environment_mode") == "separate":
        task.refusals.append(f"{path}: verifier.environment_mode: a separate image for the tests is not supported")
    task.image = _string(environment.get("docker_image", ""))
    task.workdir = _string(environment.get("workdir", ""))
    memory = environment.get("memory_mb", environment.get("memory"))
    task.memory_mb = task.memory_mb if memory is None else _mebibytes(memory)
    task.tests_s = float(verifier.get("timeout_sec", task.tests_s))
    for variables, table in ((task.variables, environment), (task.tests_variables, verifier)):
        for name, value in table.get("env", {}).items():
            if "${" in _string(value):
                task.refusals.append(f"{path}: env.{name}: a variable of this machine would reach the sandbox")
            variables[name] = value


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:40]} must be a string")
    return value


def _mebibytes(size: int | str) -> int:
    if isinstance(size, int):
        return size
    size = _string(size)
    factors = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}
    unit = size.strip()[-1:].upper()
    if unit not in factors:
        raise ValueError(f"{size!r} is not a size such as '512M'")
    return int(float(size.strip()[:-1]) * factors[unit])


def _read_tests(task: HarborTask, tests: Path, network: Network) -> None:
    """Look for the test script, and for commands in it that need a network."""
    if not (tests / "test.sh").is_file():
        task.refusals.append(f"{tests / 'test.sh'}: there is none")
    for script in sorted(path for path in tests.rglob("*.sh") if path.is_file() and not path.is_symlink()):
        with open_regular(script) as file:
            text = file.read(_TEXT_BYTES).decode("utf-8", "replace")
        for number, line in enumerate(text.split("\n"), 1):
            found = _NEEDS_NETWORK.search(line.partition("#")[0] if number > 1 else "")
            if found and network == "none":
                task.refusals.append(
                    f"{script}, line {number}: {found[0]!r} needs a network while grading; install it in the root, or "
                    "set network = 'open'"
                )
                break


class _Dockerfile:
    """Reads the instructions FROM, WORKDIR, COPY and ENV of a Dockerfile, and ignores those that change no file.

    Args:
        task: receives what they say.
        environment: the directory of the Dockerfile.
        roots: see `read_task`.
        is_built: whether the root is the image that this Dockerfile builds, so that only its settings count.
    """

    def __init__(self, task: HarborTask, environment: Path, roots: Mapping[str, str], *, is_built: bool) -> None:
        self.task, self.environment, self.roots, self.is_built = task, environment, roots, is_built
        self.fixed = frozenset(task.variables)
        """Variables of task.toml, which `ENV` does not change."""
        self.has_from = False
        self.workdir = ""

    def read(self) -> None:
        try:
            text = _text(self.environment / "Dockerfile")
        except (OSError, ValueError) as error:
            self.task.refusals.append(f"{self.environment / 'Dockerfile'}: {error}")
            return
        started, instruction = 0, ""
        for number, line in enumerate(text.split("\n"), 1):
            if line.lstrip().startswith("#") or not (line.strip() or instruction):
                continue
            started = started if instruction else number
            instruction += line.strip().removesuffix("\\")
            if line.rstrip().endswith("\\"):
                instruction += " "
                continue
            self._apply_at(started, instruction)
            instruction = ""
        if instruction.strip():  # the last line ends in a backslash
            self._apply_at(started, instruction)
        self.task.workdir = self.task.workdir or self.workdir

    def _apply_at(self, number: int, instruction: str) -> None:
        """Apply an instruction that begins in a line, or note why it cannot be honored."""
        try:
            self._apply(*instruction.strip().partition(" ")[::2])
        except ValueError as error:
            self.task.refusals.append(f"{self.environment / 'Dockerfile'}, line {number}: {error}")

    def _apply(self, word: str, rest: str) -> None:
        """Apply an instruction.

        Raises:
            ValueError: it cannot be honored.
        """
        word, rest = word.upper(), rest.strip()
        if self.is_built and word not in ("WORKDIR", "ENV"):
            return
        if word in _HARMLESS:
            return
        if word not in ("FROM", "WORKDIR", "COPY", "ENV"):
            raise ValueError(f"{word} needs an image that was built; build it, and give its files in `roots`")
        if "$" in rest:
            raise ValueError(f"{word}: variables are not expanded")
        words = shlex.split(rest)
        if not words or words[0].startswith(("--", "[")):
            raise ValueError(f"{word}: neither options nor the form in brackets is supported")
        getattr(self, f"_{word.lower()}")(words)

    def _from(self, words: list[str]) -> None:
        if self.has_from:
            raise ValueError("FROM: builds of several stages are not supported")
        self.has_from = True
        self.task.image = words[0]

    def _workdir(self, words: list[str]) -> None:
        self.workdir = normpath(join(self.workdir or "/", words[0]))
        self.task.directories.append(self.workdir)

    def _env(self, words: list[str]) -> None:
        if "=" not in words[0]:
            words = [f"{words[0]}={' '.join(words[1:])}"]
        for pair in words:
            name, _, value = pair.partition("=")
            if name not in self.fixed:
                self.task.variables[name] = value

    def _copy(self, words: list[str]) -> None:
        *patterns, destination = words
        if not patterns:
            raise ValueError("COPY: there is no destination")
        if (self.environment / ".dockerignore").exists():
            raise ValueError("COPY: .dockerignore is not read; remove it, and what it excludes")
        target = normpath(join(self.workdir or "/", destination))
        sources = [Path(path) for pattern in patterns for path in self._matches(pattern)]
        is_directory = destination.endswith("/") or self._is_directory(target)
        if len(sources) > 1 and not is_directory:
            raise ValueError(f"COPY: with several sources, the destination must end with a slash: {destination}/")
        for source in sources:
            inside = is_directory and not source.is_dir()
            self.task.copies.append((join(target, source.name) if inside else target, source))

    def _is_directory(self, target: str) -> bool:
        """Whether a path is a directory so far, of the image or by an earlier instruction."""
        made = [*self.task.directories]
        for path, source in self.task.copies:
            if source.is_dir():
                made += [
                    join(path, inner.relative_to(source)) for inner in (source, *source.rglob("*")) if inner.is_dir()
                ]
            else:
                made.append(dirname(path))
        if any(path == target or path.startswith(target.rstrip("/") + "/") for path in map(normpath, made)):
            return True
        root = self.roots.get(self.task.image, MACHINE)
        return target in _DIRECTORIES if root == MACHINE else (Path(root) / target.lstrip("/")).is_dir()

    def _matches(self, pattern: str) -> list[str]:
        top = self.environment.resolve()
        found = sorted(glob.glob(pattern.lstrip("/"), root_dir=top, include_hidden=True))
        paths = [str(top / path) for path in found]
        if not paths:
            raise ValueError(f"COPY: there is no {pattern}")
        if not all(_is_inside(Path(path), top) for path in paths):
            raise ValueError(f"COPY: {pattern} is outside of the task's environment/")
        if not all(Path(path).is_file() or Path(path).is_dir() for path in paths):
            raise ValueError(f"COPY: {pattern} is neither a file nor a directory")
        return paths


class Harbor(ToolEnvironment):
    """Harbor task directories: a shell for the policy, and the tests of each task for its reward."""

    selects = ("directory", "roots", "network")
    sandbox = Sandbox()  # in each episode, what its task says
    bash = bash(seconds=60)
    _harbor_task: HarborTask

    @classmethod
    def tasks(
        cls,
        split: Split,
        *,
        seed: int = 0,
        directory: str = "tasks",
        roots: Mapping[str, str] | None = None,
        rewards: Mapping[str, Sequence[float]] | None = None,
        failed_reward: float | None = None,
        held_out: float = 0.2,
        network: Network = "none",
    ) -> TaskSource:
        """Return the tasks of a directory of task directories.

        Args:
            split: the split.
            seed: not used.
            directory: the directory of the task directories.
            roots: see `read_task`.
            rewards: the lowest and highest value of each reward that the tests write. Default: `reward`, from 0 to 1.
            failed_reward: reward of an episode whose tests write nothing that fits `rewards`, as code of the policy can
                cause. None: that is an error of the environment.
            held_out: the share of tasks that is held out.
            network: the network of the sandboxes; with `open`, episodes restart instead of resuming.

        Raises:
            EnvironmentDefinitionError: a task cannot be honored, with the reasons.
        """
        top = Path(expand_path(directory)).resolve()
        roots = {name: expand_path(root) for name, root in (roots or {}).items()}
        tasks, refusals = [], list[str]()
        for found in task_directories(top):
            harbor_task = read_task(found, roots, network=network)
            refusals += harbor_task.refusals
            data = {
                "directory": str(top),
                "task": str(found.relative_to(top)),
                "roots": roots,
                "rewards": {name: list(bounds) for name, bounds in (rewards or {"reward": (0.0, 1.0)}).items()},
                "failed_reward": failed_reward,
                "network": network,
            }
            tasks.append(Task(id=str(found.relative_to(top)), data=data))
        if refusals:
            raise EnvironmentDefinitionError(
                "Harbor tasks that cannot be honored (`python -m agentrl_formats.harbor` lists all): "
                + "; ".join(refusals[:3])
            )
        return split_tasks(tasks, split, held_out)

    @staticmethod
    def refusals(top: Path, roots: Mapping[str, str], *, network: Network) -> dict[str, list[str]]:
        """Return why each task in a directory cannot be honored, for `python -m agentrl_formats.harbor`.

        Raises:
            EnvironmentDefinitionError: there are no tasks.
        """
        return {found.name: read_task(found, roots, network=network).refusals for found in task_directories(top)}

    async def run(self, ctx: EpisodeContext) -> None:
        """Read the task, converse, and run its tests."""
        data = ctx.task.data
        task = self._harbor_task = read_task(_task_directory(data), data["roots"], network=data["network"])
        if task.refusals:
            raise EnvironmentDefinitionError("; ".join(task.refusals))
        self.sandbox = task.sandbox(data["roots"][task.image], data["network"])
        await super().run(ctx)

    def prompt(self, task: Task) -> str:
        return self._harbor_task.instruction

    def files(self, task: Task) -> Mapping[str, str | bytes | Path]:
        files: dict[str, str | bytes | Path] = {}
        for path, source in self._harbor_task.copies:  # two directories may be copied to one
            files |= read_sources({path: source})
        return files

    async def reward(self, task: Task, episode: ToolEpisode) -> Mapping[str, float]:
        """Run the tests over a copy of the files, and return what they wrote."""
        tests = read_sources({TESTS: _task_directory(task.data) / "tests"})
        async with self.box.copy(without=(TESTS, VERDICT)) as judge:
            ran = await judge.run(
                ["bash", "-c", f"chmod +x {TESTS}/test.sh; {TESTS}/test.sh > {VERDICT}/test-stdout.txt 2>&1"],
                files=tests,
                environment=self._harbor_task.tests_variables,
                seconds=self._harbor_task.tests_s,
            )
            try:
                if ran.killed:
                    raise ValueError(f"they were ended by the limit on {ran.killed}")
                return await _verdict(judge, task.data["rewards"])
            except ValueError as error:
                failed: float | None = task.data["failed_reward"]
                if failed is None:
                    raise EpisodeError(
                        f"tests of {_task_directory(task.data)}: {error}. Set failed_reward if the policy can cause "
                        "this",
                        reason="environment_error",
                    ) from error
                return dict.fromkeys(task.data["rewards"], failed)


def _task_directory(data: Mapping[str, Any]) -> Path:
    """Return the directory of a task.

    Raises:
        EnvironmentDefinitionError: it is not inside the directory of the task directories.
    """
    top, task = Path(data["directory"]), str(data.get("task", "."))
    directory = top / task
    if not _is_inside(directory, top):
        raise EnvironmentDefinitionError(f"the task directory {task!r} is outside of {top}")
    return directory


def task_directories(top: Path) -> list[Path]:
    """Return the task directories in a directory, or the directory itself if it is one.

    Raises:
        EnvironmentDefinitionError: there is none.
    """
    found = sorted(path.parent for path in (*top.glob("task.toml"), *top.glob("*/task.toml")))
    if not found:
        raise EnvironmentDefinitionError(f"{top} has no task directories: there is no {top}/*/task.toml")
    return found


async def _verdict(judge: EpisodeSandbox, declared: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the rewards that the tests wrote: the content of reward.json, or that of reward.txt as `reward`.

    Some tests write a report to reward.json and the number to reward.txt.

    Raises:
        ValueError: there is neither, or it cannot be read.
    """
    verdict: Any = None
    with contextlib.suppress(EffectError):
        try:
            verdict = json.loads(await _read_verdict(judge, "reward.json"))
        except RecursionError as error:
            raise ValueError("reward.json is nested too deeply") from error
    if not isinstance(verdict, dict) or verdict.keys() != declared.keys():
        try:
            text = await _read_verdict(judge, "reward.txt")
        except EffectError as error:
            if verdict is None:
                raise ValueError(f"there is neither reward.json nor reward.txt in {VERDICT}") from error
            return checked_rewards(verdict, declared)
        reward = float(text)
        if math.isfinite(reward) and not _NUMBER.fullmatch(text.strip()):
            raise ValueError(f"reward.txt holds {text[:40]!r}, which is no number")
        verdict = {"reward": reward}
    return checked_rewards(verdict, declared)


async def _read_verdict(judge: EpisodeSandbox, name: str) -> bytes:
    content = await judge.read(f"{VERDICT}/{name}", limit=_VERDICT_BYTES + 1)
    if len(content) > _VERDICT_BYTES:
        raise ValueError(f"{name} is longer than {_VERDICT_BYTES:,} bytes")
    return content


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def checked_rewards(verdict: Any, declared: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the rewards of a verdict.

    Raises:
        ValueError: they are not the declared names with finite values within the declared bounds.
    """
    if not isinstance(verdict, dict) or verdict.keys() != declared.keys():
        names = ", ".join(map(str, verdict)) if isinstance(verdict, dict) else repr(verdict)[:100]
        raise ValueError(f"they wrote {names[:200] or 'nothing'}, but the declared rewards are {', '.join(declared)}")
    for name, value in verdict.items():
        low, high = declared[name]
        if not _is_finite(value) or not low <= value <= high:
            raise ValueError(f"they wrote {name} = {str(value)[:40]}, which is no number from {low:g} to {high:g}")
    return {name: float(value) for name, value in verdict.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print which task directories can be played, and why others cannot; returns 1 if one is refused."""
    parser = argparse.ArgumentParser(prog="python -m agentrl_formats.harbor", description=main.__doc__)
    parser.add_argument("directory", type=Path, help="a task directory, or a directory of them")
    text = "directory with the files of an image, or / for this machine's /usr; may be repeated"
    parser.add_argument("--root", metavar="IMAGE=DIR", action="append", default=[], help=text)
    parser.add_argument("--network", choices=["none", "open"], default="none", help="network of the sandboxes")
    options = parser.parse_args(arguments)
    roots = {}
    for pair in options.root:
        image, equals, directory = pair.rpartition("=")
        if not equals:
            parser.error(f"--root {pair}: write IMAGE=DIRECTORY")
        roots[image] = expand_path(directory)
    try:
        refusals = Harbor.refusals(options.directory.expanduser().resolve(), roots, network=options.network)
    except EnvironmentDefinitionError as error:
        parser.error(str(error))
    for name, reasons in refusals.items():
        lines = [f"{name}: {'refused' if reasons else 'can be played'}", *(f"  {reason}" for reason in reasons)]
        sys.stdout.writelines(f"{ascii(line)[1:-1]}\n" for line in lines)
    usable = sum(not reasons for reasons in refusals.values())
    sys.stdout.write(f"{usable} of {len(refusals)} tasks can be played\n")
    return 0 if usable == len(refusals) else 1


if __name__ == "__main__":
    raise SystemExit(main())
