"""The shape of the code: how many files one episode enters, and how many things a reader has to know.

    python -m benchmarks.code_shape [--quick] [--list]

Traced in this process, after an untraced first round has imported everything. Functions of `agentrl/` and
`environments/` count; a file counts once, however often it is entered.
`files_per_episode`, `calls_between_files`: from the moment the loop asks for the task of a four-turn calculator
episode until the optimizer step on its one unit is reported, with the embedded engine and the trainer in this process.
A call is between files if caller and callee stand in different ones; a coroutine is called once, however often it is
resumed.
`update_files`: the part of that from the optimizer step on: publish the version, serve it, report the step.
Timers of the run, such as the display's once a second, are left out: the machine's speed says whether one falls inside.
`resume_files_entered`: a run with a checkpoint, killed in the middle of its second episode once the journal holds all
that the episode has done, is resumed: from the call of `agentrl.train(resume=True)` until the episode uses its tool for
the first time since the kill that no journal entry answers. Most of these files any start enters: configuration, model,
engine, trainer, the episode itself.
`resume_files`: those of them with a function that the resume enters and a fresh start of the same run, up to the same
use of the tool, does not: what a reader has to know besides to follow a resume.
`episode_show_files`: the command `agentrl episode show`.

Read from the source of `agentrl/`:
`modules`, `single_importer_modules` (imported by exactly one other module), `duplicate_class_names` (names that classes
of several modules share). `benchmarks.suite --part size` counts lines and settings.
`private_words`: definitions (modules, classes, functions, methods) named with a word of `PRIVATE_WORDS`, without
`FIELD_TERMS`; and methods of `OVERLOADED` where more than three classes have them.
`decisions_from_prose`: places that look for words in a text for people: a search, comparison or split of a message, a
reason, an advice, … (`PROSE`), or of the text of an exception. A cause is a value, and its text is derived from it.
Texts of other libraries, and old records, are read in the functions of `FOREIGN_TEXTS`.
`reports_with_many_fields`: classes named `…Report` or `…Result` with more than `MAX_REPORT_FIELDS` fields. A report is
a list of parts, each with its findings.
`refusal_places`: functions that refuse a combination of settings: one raises what `compatible` finds, and each further
one has a `ConfigError` or `ValueError` that names settings of two sections in one text. The functions of
`OTHER_REFUSALS` compare numbers, names or files. A text that is put together elsewhere is not seen.
`column_lists`: lists of three or more columns of tokens (`COLUMN_NAMES`), in displays and in the fields of classes,
without kinds of `Tokens` and `DECLARATIONS`. One is the table.

`--quick` traces nothing; `--list` prints what each figure counts, before the last line.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dis
import inspect
import io
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, ClassVar, Literal

import agentrl
from agentrl.cli.main import main as main_of_agentrl
from agentrl.config.load import load
from agentrl.core.records import PolicyVersion, Task
from agentrl.core.tokens import COLUMNS
from agentrl.environments.calculator import Calculator
from agentrl.inspection.reader import RunReader
from agentrl.journal.reader import TurnLogReader
from benchmarks.report import Report
from docs.generators.configuration import documented_keys

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "agentrl"
TRACED_FIGURES = (
    *("files_per_episode", "calls_between_files", "update_files"),
    *("resume_files", "resume_files_entered", "episode_show_files"),
)
FIGURES = (
    *TRACED_FIGURES,
    "modules",
    "single_importer_modules",
    "duplicate_class_names",
    "private_words",
    "column_lists",
    "reports_with_many_fields",
    "decisions_from_prose",
    "refusal_places",
)

TURNS = 4
SECOND_CALL_ENTRIES = 4
"""Number of journal entries before the second call of the tool: the beginning, a turn, the first call, a turn."""

PRIVATE_WORDS = (
    *("room", "place", "places", "rest", "spare", "firm", "lives", "beside", "apart", "speech", "spoken", "fed"),
    *("drought", "guest", "outside", "served", "told", "heard", "passage", "suited", "strayed", "lacks", "take_back"),
    *("forsaken", "trial", "probe", "choice", "composition", "under_way", "wave", "past"),
)
"""Words of this project alone, or used for something else than the field uses them for: parts of names."""
FIELD_TERMS: Mapping[str, str] = {
    "ServedModelCopy": "the copy of the model that an engine serves, as in vLLM's `served_model_name`",
    "ServedVersions": "the versions that an engine serves",
    "VersionNotServedError": "the engine does not serve this version",
}
"""Names that hold such a word in the field's own sense, and that sense."""
OVERLOADED = ("take", "release", "leave", "ended")
"""Verbs that were the name of a method in sixteen to nineteen classes each."""


COLUMN_NAMES = frozenset(
    ("token_ids", "kept", "experts", "lags", *(name for column in COLUMNS for name in (column.name, column.in_loss)))
) - {""}
"""Names of columns of tokens, in the table and in the batch of a loss."""
MAX_REPORT_FIELDS = 12
DECLARATIONS: Mapping[str, str] = {
    "ExportedRow": "a line of an export: its names are the format, and further columns are in `recorded`",
    "LossBatch": "declares its columns for the type checker; `tests/unit/test_columns.py` names a missing one",
}
"""Classes that declare columns by name beside the table, and why they may."""
PROSE = frozenset(
    (
        *("advice", "cause", "detail", "error", "exception", "failure", "fault", "finding", "findings", "hint", "line"),
        *("message", "phase", "problem", "reason", "refusal", "remedy", "sentence", "text", "warning", "why", "words"),
        *("errors", "failures", "messages", "problems", "reasons", "sentences", "warnings"),
    )
)
"""Last words in the names of texts for people. Words in `_OF_ANYTHING` count only as attributes, as in `hold.text`."""
_OF_ANYTHING = frozenset(("text", "line", "words"))
_SEARCHES = frozenset(
    (
        *("startswith", "endswith", "partition", "rpartition", "removeprefix", "removesuffix", "split", "rsplit"),
        *("find", "rfind", "index", "rindex", "count"),
    )
)
_PATTERN_SEARCHES = frozenset(("search", "match", "fullmatch", "findall", "finditer", "split"))
_FORMATS = frozenset(("str", "repr", "format_foreign_error", "describe_user_code_error"))
FOREIGN_TEXTS: Mapping[str, str] = {
    "agentrl.cluster.trainer_pool:_misses_a_rank": "torch's",
    "agentrl.config.load:read_toml": "tomllib's",
    "agentrl.config.mistakes:_explain": "pydantic's",
    "agentrl.core.event_loop:was_stopped": "asyncio's",
    "agentrl.core.reply_formats:parse_harmony": "a model's",
    "agentrl.engines.vllm.startup:start_vllm": "vLLM's",
    "agentrl.environment.tool_arguments:read_arguments": "pydantic's",
    "agentrl.environment.tool_arguments:_check_values": "pydantic's",
    "agentrl.inspection.search:_open": "SQLite's",
    "agentrl.observe.alarms:always_fails_alarms": "of the user's calls",
    "agentrl.testing.check:check_tools": "Python's, of exceptions that the user's tools raise",
    "agentrl.testing.execution:Failure.is_late": "of clients in the user's program",
    "agentrl.testing.execution:missing_awaits": "Python's",
}
"""Functions that look for words in texts which are not ours, and whose texts these are."""
OTHER_REFUSALS: Mapping[str, str] = {
    "agentrl.app.policies:check_fill": "a group that does not fit a step",
    "agentrl.cluster.trainer_pool:refuse_monkeypatches": "changed functions of this process",
    "agentrl.config.run:RunConfig._check_models": "a policy without a model",
    "agentrl.config.run:RunConfig._check_sampling": "a temperature at which nothing is learned",
    "agentrl.config.run:RunConfig.check_turns_fit": "turns longer than a context",
    "agentrl.config.run:_check_scorers": "a table that lacks a name of another",
}
"""Functions whose errors name settings of two sections, and what they refuse instead of a combination."""
SECTIONS = frozenset(key.partition(".")[0] for key in documented_keys() if "." in key) | {"deterministic"}


# --- tracing ----------------------------------------------------------------------------------------------------------


_INNER = re.compile(r"(\.<locals>\.<\w+>)+$")
"""The end of the qualified name of a comprehension, generator expression or lambda."""


@dataclass(slots=True)
class Trace:
    """Functions entered, in order: the file and qualified name of each, and the file of its caller where that is one
    of ours."""

    events: list[tuple[str, str, str | None]] = field(default_factory=list)

    def files(self) -> list[str]:
        """The files entered, in order of name."""
        return sorted({file for file, _, _ in self.events})

    def calls_between_files(self) -> int:
        """Calls from a function of one file into another file."""
        return sum(1 for file, _, caller in self.events if caller is not None and caller != file)

    def since(self, function: str) -> Trace:
        """The events from the first call of `function` on."""
        names = [name.rpartition(".")[2] for _, name, _ in self.events]
        return Trace(self.events[names.index(function) :])

    def besides(self, other: Trace) -> dict[str, list[str]]:
        """The functions that `other` does not enter, by file, both in order of name; comprehensions are part of the
        function they stand in."""
        theirs = {(file, _INNER.sub("", name)) for file, name, _ in other.events}
        own: dict[str, set[str]] = defaultdict(set)
        for file, name in {(file, _INNER.sub("", name)) for file, name, _ in self.events} - theirs:
            own[file].add(name)
        return {file: sorted(names) for file, names in sorted(own.items())}


class Tracer:
    """Records the calls of all threads between `begin` and `end`. Install it before any thread is started."""

    def __init__(self) -> None:
        self._trace: Trace | None = None
        self._files: dict[CodeType, str | None] = {}

    def install(self) -> None:
        """Watch this thread and those that are started from now on."""
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)

    def begin(self) -> None:
        """Forget what was recorded, and record."""
        self._trace = Trace()

    def end(self) -> Trace:
        """Stop recording; what was recorded."""
        trace, self._trace = self._trace, None
        return trace or Trace()

    def _on_event(self, frame: FrameType, event: str, argument: object) -> None:
        trace = self._trace
        if trace is None or event != "call":
            return
        file = self._file_of(frame.f_code)
        if file is None or _is_resumed(frame) or _is_in_timer(frame):
            return
        caller = frame.f_back
        while caller is not None and caller.f_code.co_filename in _TRANSPARENT:
            caller = caller.f_back
        trace.events.append((file, frame.f_code.co_qualname, None if caller is None else self._file_of(caller.f_code)))

    def _file_of(self, code: CodeType) -> str | None:
        """The file of a function, relative to the repository; None where it is not ours, or a module's own body."""
        if code not in self._files:
            is_ours = code.co_filename.startswith(f"{PACKAGE}/") and code.co_name != "<module>"
            self._files[code] = code.co_filename.removeprefix(f"{ROOT}/") if is_ours else None
        return self._files[code]


_TRANSPARENT = {contextlib.__file__}
"""Who calls through these calls what they call."""


def _is_resumed(frame: FrameType) -> bool:
    """Whether a call event is a coroutine or generator going on, not a call."""
    if not frame.f_code.co_flags & (inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR):
        return False
    return frame.f_lasti > _first_instruction(frame.f_code)


_TIMERS = {"RunObserver._look", "_Watch._renew"}
"""Callbacks that run once a second or more often, whatever the run does."""


def _is_in_timer(frame: FrameType) -> bool:
    """Whether a call stands below a timer of the event loop."""
    above: FrameType | None = frame
    while above is not None:
        if above.f_code.co_qualname in _TIMERS:
            return True
        above = above.f_back
    return False


_FIRST: dict[CodeType, int] = {}


def _first_instruction(code: CodeType) -> int:
    """Where a coroutine stands when it is entered for the first time."""
    if code not in _FIRST:
        _FIRST[code] = next(each.offset for each in dis.get_instructions(code) if each.opname == "RESUME")
    return _FIRST[code]


# --- what is traced ---------------------------------------------------------------------------------------------------


class Tasks:
    """The same sum, over and over.

    The loop's first request for it begins the trace: the second of all, since a run's start reads a task to see that it
    can.
    """

    def __init__(self, task: Task, tracer: Tracer | None = None) -> None:
        self._task, self._tracer = task, tracer
        self._requests = 0

    def __getitem__(self, index: int) -> Task:
        self._requests += 1
        if self._requests == 2 and self._tracer is not None:
            self._tracer.begin()
        return self._task

    def __len__(self) -> int:
        return 1_000_000


class StepEnds:
    """An observer that ends the trace when a step is reported."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self.trace = Trace()

    def on_step(self, policy: str, step: int, metrics: Mapping[str, float]) -> None:
        """End the trace."""
        self.trace = self._tracer.end()

    def on_evaluation(self, versions: Mapping[str, PolicyVersion], metrics: Mapping[str, Mapping[str, float]]) -> None:
        """Nothing is evaluated."""


class Sums(Calculator):
    """The calculator, which tells how often it was used in this process."""

    calls: ClassVar[int] = 0
    on_call: ClassVar[Callable[[int], None]] = staticmethod(lambda number: None)
    """Called with the number of each call, from 1, before it is answered."""

    @agentrl.tool
    def calculate(self, a: int, op: Literal["+", "-", "*"], b: int) -> int:
        """One operation on two integers."""
        Sums.calls += 1
        Sums.on_call(Sums.calls)
        return super().calculate(a, op, b)


def train(directory: Path, name: str, task: Task, *, steps: int = 1, resume: bool = False, **more: Any) -> agentrl.Run:
    """A run of `steps` steps of one unit each, every part of it in this process."""
    overrides = [
        *(f"--name={name}", f"--directory={directory}", f"--steps={steps}", "--evaluation.tasks=0"),
        *("--engine.slots=4", "--max_in_flight=1"),
        *("--credit.group_size=1", "--credit.advantage=none"),
        *("--policies.solver.step_size=1", "--policies.solver.max_staleness=0"),
    ]
    config = load(ROOT / "examples" / "01_tool_use.toml", overrides)
    Sums.calls = 0
    tasks = more.pop("tasks", None) or Tasks(task)
    return agentrl.train(config, environment=Sums, tasks=tasks, resume=resume, quiet=True, **more)


def four_turn_task(directory: Path) -> Task:
    """A held-out task that the model that comes with the calculator solves in `TURNS` turns: 4 terms need 3 calls."""
    for number, task in enumerate(Calculator.tasks("held_out")):
        if len(re.findall(r"[+-] ", task.data["question"])) == TURNS - 1:
            run = train(directory, f"search-{number}", task)
            if turns_of(run.path) == TURNS:
                return task
    raise SystemExit("code_shape: no task is solved in four turns")


def turns_of(run: Path) -> int:
    """The turns of a run's only episode."""
    reader = RunReader(run)
    try:
        return reader.episodes()[0].turns
    finally:
        reader.close()


def traced_figures(directory: Path) -> dict[str, list[str] | int]:
    """What was entered, by figure: files, or a count."""
    tracer = Tracer()
    tracer.install()
    task = four_turn_task(directory)
    step = StepEnds(tracer)
    episode = train(directory, "traced", task, tasks=Tasks(task, tracer), observers=[step])
    update = step.trace.since("optim_step")
    shown = shown_episode(episode.path, tracer)
    resume = resumed(directory, task, tracer)
    fresh = until_call(TURNS - 1 + 3, tracer, directory, "fresh", task)
    return {
        "files_per_episode": step.trace.files(),
        "calls_between_files": step.trace.calls_between_files(),
        "update_files": update.files(),
        "resume_files": [f"{file}: {', '.join(names)}" for file, names in resume.besides(fresh).items()],
        "resume_files_entered": resume.files(),
        "episode_show_files": shown.files(),
    }


def shown_episode(run: Path, tracer: Tracer) -> Trace:
    """`agentrl episode show`, the second time: the first imports what it needs."""
    arguments = ["episode", "show", str(run)]
    for _ in range(2):
        tracer.begin()
        with contextlib.redirect_stdout(io.StringIO()):
            code = main_of_agentrl(arguments)
        trace = tracer.end()
    if code:
        raise SystemExit(f"code_shape: agentrl {' '.join(arguments)}: exit code {code}")
    return trace


def resumed(directory: Path, task: Task, tracer: Tracer) -> Trace:
    """A run that was killed at the second call of its second episode goes on, up to the third."""
    command = [sys.executable, "-m", "benchmarks.code_shape", "--die-in", str(directory), "--task", task.id]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode != -signal.SIGKILL:
        raise SystemExit(f"code_shape: the run to resume ended otherwise than by its kill: {ended.stderr}")
    return until_call(3, tracer, directory, "killed", task, resume=True)


def until_call(last: int, tracer: Tracer, directory: Path, name: str, task: Task, *, resume: bool = False) -> Trace:
    """A run of two steps, from its start until the tool is called for the `last` time, calls that are replayed too."""
    traces: list[Trace] = []

    def end_trace(number: int) -> None:
        if number == last:
            traces.append(tracer.end())

    Sums.on_call = staticmethod(end_trace)
    tracer.begin()
    train(directory, name, task, steps=2, resume=resume)
    Sums.on_call = staticmethod(lambda number: None)
    if not traces:
        raise SystemExit(f"code_shape: the run {name!r} called the tool fewer than {last} times")
    return traces[0]


def die(directory: Path, task_id: str) -> None:
    """Train for a step, go on until the second episode calls the tool for the second time, and kill this process."""

    def kill(number: int) -> None:
        if number == 2:
            journal = TurnLogReader(directory / "killed" / "journal")
            while journal.progress("e1", 0)[0] < SECOND_CALL_ENTRIES:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

    task = next(task for task in Calculator.tasks("held_out") if task.id == task_id)
    train(directory, "killed", task)
    Sums.on_call = staticmethod(kill)
    train(directory, "killed", task, steps=2, resume=True)


# --- read from the source ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A module of the package."""

    name: str
    is_package: bool
    text: str
    tree: ast.Module


def modules_of(package: Path) -> list[Module]:
    """Every module of the package, in order of path."""
    found = []
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        text = path.read_text(encoding="utf-8")
        name = ".".join(parts[:-1] if is_package else parts)
        found.append(Module(name=name, is_package=is_package, text=text, tree=ast.parse(text)))
    return found


def single_importers(modules: Sequence[Module]) -> list[str]:
    """Modules (packages and entry points left out) that exactly one other module imports, with it."""
    known = {module.name for module in modules}
    importers: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        for imported in imported_modules(module.tree, known):
            if imported != module.name:
                importers[imported].add(module.name)
    return [
        f"{module.name} <- {next(iter(importers[module.name]))}"
        for module in modules
        if not module.is_package and len(importers[module.name]) == 1
    ]


def imported_modules(tree: ast.Module, known: set[str]) -> Iterator[str]:
    """Modules of the package that a file imports, at its top or later."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in known else node.module


def duplicate_classes(modules: Sequence[Module]) -> list[str]:
    """Names that classes of several modules have, with the modules."""
    places: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].add(module.name)
    return [f"{name}: {', '.join(sorted(where))}" for name, where in sorted(places.items()) if len(where) > 1]


def words_of(name: str) -> list[str]:
    """The words of a name, in lower case.

    >>> words_of("KVBudget"), words_of("max_staleness"), words_of("child episode")
    (['kv', 'budget'], ['max', 'staleness'], ['child', 'episode'])
    """
    split = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    return [word for word in re.split(r"[_\W]+", split.lower()) if word]


def holds_words(name: Sequence[str], sought: Sequence[str]) -> bool:
    """Whether the words of `sought` stand side by side in a name; the last may be in the plural."""
    for start in range(len(name) - len(sought) + 1):
        part = list(name[start : start + len(sought)])
        if part == list(sought) or (
            part[:-1] == list(sought[:-1]) and part[-1] in (f"{sought[-1]}s", f"{sought[-1]}es")
        ):
            return True
    return False


def private_words(modules: Sequence[Module]) -> list[str]:
    """Definitions named with a private word, and overloaded verbs with the classes that have them."""
    sought = [words_of(word) for word in PRIVATE_WORDS]
    found: list[str] = []
    verbs: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        definitions = [node for node in ast.walk(module.tree) if isinstance(node, _DEFINITIONS)]
        names = (module.name.rpartition(".")[2], *(node.name for node in definitions))
        for name in (name for name in names if name not in FIELD_TERMS):
            found += [f"{module.name}: {name}"] * any(holds_words(words_of(name), word) for word in sought)
        for owner in definitions:
            methods = (node.name for node in owner.body if isinstance(node, _DEFINITIONS))
            for method in methods if isinstance(owner, ast.ClassDef) else ():
                if method in OVERLOADED:
                    verbs[method].append(f"{module.name}: {owner.name}.{method}")
    return found + [method for methods in verbs.values() if len(methods) > 3 for method in methods]


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def column_lists(modules: Sequence[Module]) -> list[str]:
    """Literal collections and classes that name at least three columns, except kinds of `Tokens`."""
    found = []
    for module in modules:
        for node in ast.walk(module.tree):
            names: list[str] = []
            if isinstance(node, ast.Tuple | ast.List | ast.Set | ast.Dict):
                names = _names_in(node)
            elif isinstance(node, ast.ClassDef) and "Tokens" not in [node.name, *map(ast.unparse, node.bases)]:
                fields = [field.target for field in node.body if isinstance(field, ast.AnnAssign)]
                names = [] if node.name in DECLARATIONS else list(map(ast.unparse, fields))
            if len(columns := COLUMN_NAMES & set(names)) > 2:
                found.append(f"{module.name}:{node.lineno} ({', '.join(sorted(columns))})")
    return found


def reports_with_many_fields(modules: Sequence[Module]) -> list[str]:
    """Classes of reports and results with too many fields."""
    found = []
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef) and words_of(node.name)[-1:] in (["report"], ["result"]):
                number = sum(isinstance(field, ast.AnnAssign) for field in node.body)
                found += [f"{module.name}: {node.name} ({number} fields)"] * (number > MAX_REPORT_FIELDS)
    return found


def decisions_from_prose(modules: Sequence[Module]) -> list[str]:
    """Places that decide by the words of a text for people."""
    found = []
    for module in modules:
        for function, node in _nodes_by_function(module.tree):
            if f"{module.name}:{function}" not in FOREIGN_TEXTS and _looks_for_words(node):
                found.append(f"{module.name}:{function}, line {node.lineno}: {ast.unparse(node)}")
    return found


def refusal_places(modules: Sequence[Module]) -> list[str]:
    """Functions that refuse a combination of two settings."""
    found = []
    for module in modules:
        for name, function in _functions(module.tree):
            place = f"{module.name}:{name}"
            calls: dict[str, list[ast.Call]] = defaultdict(list)
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    calls[node.func.id].append(node)
            errors = calls["ConfigError"] + calls["ValueError"]
            names_two = any(len(_sections_in(error)) > 1 for error in errors) and place not in OTHER_REFUSALS
            found += [f"{place}, line {function.lineno}"] * (names_two or bool(errors and calls["compatible"]))
    return found


def _functions(tree: ast.AST, owner: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """The outermost functions and the methods of a module, with their qualified names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{owner}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{owner}{node.name}", node


def _sections_in(node: ast.Call) -> set[str]:
    """The sections whose settings the text of an error names."""
    texts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    words = re.findall(r"(?<![\w.])(\w+)(?:\.(?=[a-z*])| = )|\b(policies|scorers)\.$", "\n".join(texts), re.MULTILINE)
    return SECTIONS.intersection(itertools.chain.from_iterable(words))


def _nodes_by_function(tree: ast.AST, function: str = "") -> Iterator[tuple[str, ast.expr]]:
    """The expressions of a module, each with the qualified name of the function that it stands in."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, _DEFINITIONS):
            yield from _nodes_by_function(node, f"{function}.{node.name}".lstrip("."))
            continue
        if isinstance(node, ast.expr):
            yield function, node
        yield from _nodes_by_function(node, function)


def _looks_for_words(node: ast.expr) -> bool:
    match node:
        case ast.Call(func=ast.Attribute(value=subject, attr=name), args=arguments):
            if name in _SEARCHES and _is_prose(subject):
                return any(map(_may_be_words, arguments))
            return name in _PATTERN_SEARCHES and any(map(_is_prose, arguments))
        case ast.Compare(left=left, ops=[ast.In() | ast.NotIn()], comparators=[container]):
            return _is_prose(container) and (_is_formatted(container) or _are_words(left))
        case ast.Compare(ops=[ast.Eq() | ast.NotEq()]):
            sides = (node.left, *node.comparators)
            return any(isinstance(side, ast.Constant) and " " in str(side.value) for side in sides) and any(
                map(_is_prose, sides)
            )
    return False


def _is_prose(node: ast.expr) -> bool:
    """Whether an expression is a text for people, by its name; or a part of one."""
    match node:
        case ast.Name(id=name):
            word = words_of(name)[-1:]
            return bool(PROSE.difference(_OF_ANYTHING).intersection(word))
        case ast.Attribute(attr=name):
            return bool(PROSE.intersection(words_of(name)[-1:]))
        case ast.Call(func=ast.Name(id=name), args=[argument, *_]) if name in ("str", "repr"):
            return _is_prose(argument)
        case ast.Call(func=ast.Name(id=name)):
            return name in _FORMATS
        case ast.Call(func=ast.Attribute(value=subject)) | ast.Subscript(value=subject):
            return _is_prose(subject)
        case ast.BoolOp(values=values):
            return any(map(_is_prose, values))
        case ast.JoinedStr(values=values):
            return any(isinstance(value, ast.FormattedValue) and _is_prose(value.value) for value in values)
    return False


def _is_formatted(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FORMATS


def _are_words(node: ast.expr) -> bool:
    """Whether the left side of `in` is text, not the key of a mapping."""
    match node:
        case ast.Constant(value=str(value)):
            return not value.isidentifier()
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.isupper() or _is_prose(node)
    return False


def _may_be_words(node: ast.expr) -> bool:
    """Whether an argument is, or may be, more than punctuation and white space."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and any(letter.isalpha() for letter in node.value)
    return True


def _names_in(node: ast.AST | None) -> list[str]:
    """The texts that a display lists, also as keys, or as the first argument of each of its calls."""
    match node:
        case ast.Constant(value=str(name)):
            return [name]
        case ast.Starred(value=inner) | ast.Call(args=[inner, *_]):
            return _names_in(inner)
        case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts) | ast.Dict(keys=parts):
            return [name for part in parts for name in _names_in(part)]
    return []


def source_figures() -> dict[str, list[str] | int]:
    """What the source holds, by figure: names, or a count."""
    modules = modules_of(PACKAGE)
    return {
        "modules": len(modules),
        "single_importer_modules": single_importers(modules),
        "duplicate_class_names": duplicate_classes(modules),
        "private_words": private_words(modules),
        "column_lists": column_lists(modules),
        "reports_with_many_fields": reports_with_many_fields(modules),
        "decisions_from_prose": decisions_from_prose(modules),
        "refusal_places": refusal_places(modules),
    }


# --- the command ------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="nothing is traced")
    parser.add_argument("--list", action="store_true", help="what each figure counts, before the last line")
    parser.add_argument("--die-in", type=Path, help=argparse.SUPPRESS)  # the process that `resumed` has killed
    parser.add_argument("--task", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.die_in:
        return die(options.die_in, options.task)
    found = source_figures()
    if not options.quick:
        with tempfile.TemporaryDirectory(prefix="agentrl-code-shape-") as directory:
            found |= traced_figures(Path(directory))
    report = Report("code_shape", quick=options.quick, repeats=1, compared_with="nothing")
    for name in FIGURES:
        value = found.get(name)
        if options.list and isinstance(value, list):
            print(f"{name}:", *value, sep="\n  ")
        report.figures[name] = len(value) if isinstance(value, list) else value
    report.print()


if __name__ == "__main__":
    main()
