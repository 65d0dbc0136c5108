"""A run as data for Python: plain records, and data frames of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import msgspec
from msgspec.structs import asdict

from agentrl.core.errors import InputError, JournalError
from agentrl.inspection.conversation import PolicyTurn, RewardAct, build_conversation
from agentrl.inspection.export.episodes import ExportedEpisode, encode_json, read_episode
from agentrl.inspection.reader import EpisodeLine, EpisodeView, RunReader, convert_damage_errors
from agentrl.inspection.search import episodes_with_words
from agentrl.inspection.steps import EvaluationLine, StepLine, evaluation_list, step_list
from agentrl.inspection.tokens import EpisodeToken, read_step_rows, tokens_from_view

if TYPE_CHECKING:
    from types import TracebackType

PAGE_EPISODES = 200
"""Number of episodes whose summaries are read at once."""
FRAME_LIBRARIES = ("pandas", "polars")
_BY_NAME = {"metrics": "{}", "rewards": "reward/{}", "fields": "{}", "recorded": "{}"}
"""Fields of records that hold values by name, with the names of their columns in a frame."""
_PLAIN = (str, int, float, bool, type(None))
RecordT = TypeVar("RecordT", bound=msgspec.Struct)


class MetricValue(msgspec.Struct, frozen=True, kw_only=True):
    """A metric of a policy at a step."""

    name: str
    policy: str
    step: int
    value: float | None
    """None if it was not finite."""


class EpisodeTurn(PolicyTurn, frozen=True, kw_only=True, tag="turn"):
    """A turn of a policy in an episode."""

    episode: str
    attempt: int


class EpisodeReward(msgspec.Struct, frozen=True, kw_only=True):
    """A component of an agent's reward, which is the sum of `value * weight`."""

    episode: str
    attempt: int
    seat: str
    index: int
    name: str
    value: float
    weight: float
    turn: int | None
    """Turn of the component; None if it is for the episode."""


class RowToken(EpisodeToken, frozen=True, kw_only=True):
    """A token of an agent's row."""

    episode: str
    attempt: int
    seat: str
    index: int
    policy: str
    row: int
    step: str | None
    """Version made by the step that trained the row; None: no step did."""
    recorded: dict[str, float | None]
    """Further columns that the engine recorded."""


class Records(Generic[RecordT]):
    """Records of a run, read from its journal each time they are iterated."""

    def __init__(
        self,
        kind: type[RecordT],
        read: Callable[[], Iterable[RecordT]],
        reading: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._kind = kind
        self._read = read
        self._reading = reading

    def __iter__(self) -> Iterator[RecordT]:
        with self._reading():
            yield from self._read()

    def frame(self, library: Literal["pandas", "polars"] | None = None) -> Any:
        """Return a data frame with a line per record and a column per field.

        Values by name have a column each, such as `reward/solver`. Lists and objects are JSON.

        Args:
            library: the library of the frame; by default pandas, or polars if only that is installed.

        Raises:
            ImportError: the library is not installed.
        """
        frame = _frame_class(library)
        columns: dict[str, list[Any]] = {name: [] for name in self._kind.__struct_fields__ if name not in _BY_NAME}
        for length, record in enumerate(self):
            for name, value in _cells(record).items():
                columns.setdefault(name, [None] * length).append(value)
            for values in columns.values():
                values.extend([None] * (length + 1 - len(values)))
        return frame(columns)


def _cells(record: msgspec.Struct) -> dict[str, Any]:
    """Return the values of a record by column of a frame; a field comes before a value by name."""
    cells: dict[str, Any] = {}
    by_name: dict[str, Any] = {}
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if name in _BY_NAME:
            by_name |= {_BY_NAME[name].format(key): item for key, item in value.items()}
        else:
            cells[name] = value if isinstance(value, _PLAIN) else encode_json(value).decode()
    return by_name | cells


def _frame_class(library: str | None) -> Callable[[dict[str, list[Any]]], Any]:
    for name in FRAME_LIBRARIES if library is None else (library,):
        try:
            frame = import_module(name).DataFrame
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
            continue
        # A column may begin with many nulls or whole numbers.
        return partial(frame, strict=False, infer_schema_length=None) if name == "polars" else frame
    wanted, package = library or " or ".join(FRAME_LIBRARIES), library or FRAME_LIBRARIES[0]
    raise ImportError(f"a data frame needs {wanted}; install it with: pip install {package}")


class RecordedRun:
    """A run as data, from its directory, also while the run is written; use it in a `with` statement, or call `close`.
    Only `match` writes something: its index, `search.db` in the run's directory.

    A filter (`where`) and words (`match`) choose episodes as the options of `agentrl episode list` do. Episodes come in
    the order of admission. One that cannot be read is left out of turns, rewards and tokens, and named in `problems`.
    """

    def __init__(self, path: str | Path) -> None:
        self._reader = RunReader(path)
        self._is_closed = False
        self.problems: list[str] = []
        """What could not be read so far, with its episode if it is of one."""

    def __enter__(self) -> RecordedRun:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"RecordedRun({str(self.path)!r})"

    @property
    def path(self) -> Path:
        """Directory of the run."""
        return self._reader.path

    @property
    def state(self) -> str:
        """State of the run: `running`, `finished`, `stopped`, `failed`, `killed` or `unknown`; empty if no process ever
        led it."""
        with self._reading():
            return self._reader.standing()

    @property
    def config(self) -> dict[str, Any]:
        """Resolved configuration, with all changes since the start."""
        with self._reading():
            return self._reader.config()

    def close(self) -> None:
        """Close the run's files. Idempotent."""
        self._is_closed = True
        self._reader.close()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Refuse a closed run, and name damage to the journal that breaks the code in the context."""
        if self._is_closed:
            raise InputError(f"{self.path}: the run was closed; read its records inside the `with` statement")
        with convert_damage_errors(self._reader.log):
            yield

    def _records(self, kind: type[RecordT], read: Callable[[], Iterable[RecordT]]) -> Records[RecordT]:
        return Records(kind, read, self._reading)

    def steps(self) -> Records[StepLine]:
        """Return the optimizer steps in order, including those that a rollback undid (`survives` is then False)."""
        return self._records(StepLine, self._steps)

    def metrics(self, *names: str) -> Records[MetricValue]:
        """Return the values of metrics by name, policy and step; without names, of all metrics."""
        return self._records(MetricValue, lambda: self._metrics(names))

    def evaluations(self) -> Records[EvaluationLine]:
        """Return the evaluations of each policy, with their metrics."""
        return self._records(EvaluationLine, lambda: evaluation_list(self._reader))

    def episode(self, episode: str, attempt: int | None = None) -> ExportedEpisode:
        """Return an episode with its whole content, as in `agentrl run export --to jsonl`: agents, rows of tokens with
        their messages, rewards, tool calls and other acts.

        Args:
            episode: id of the episode.
            attempt: attempt at it; None: the newest.

        Raises:
            InputError: there is no such episode.
            JournalError: its records are damaged.
        """
        with self._reading():
            return read_episode(self._reader, self._reader.episode(episode, attempt), read_step_rows)

    def episodes(self, where: str = "", *, match: str = "", fields: Sequence[str] = ()) -> Records[EpisodeLine]:
        """Return the summaries of episodes.

        Args:
            where: filter.
            match: words to find.
            fields: each `metric.NAME` of the environment and each `data.NAME` of the task to read into `fields`.

        Raises:
            InputError: when they are iterated, if the filter or a field cannot be read.
        """
        return self._records(EpisodeLine, lambda: self._episodes(where, match, list(dict.fromkeys(fields))))

    def turns(self, where: str = "", *, match: str = "") -> Records[EpisodeTurn]:
        """Return the turns of all policies, episode by episode, in the order in which they were recorded."""
        return self._records(EpisodeTurn, lambda: self._of_episodes(where, match, self._turns))

    def rewards(self, where: str = "", *, match: str = "") -> Records[EpisodeReward]:
        """Return the components of rewards, episode by episode."""
        return self._records(EpisodeReward, lambda: self._of_episodes(where, match, self._rewards))

    def tokens(self, where: str = "", *, match: str = "") -> Records[RowToken]:
        """Return the tokens of all rows, episode by episode, with their versions and what a step made of them."""
        read = lru_cache(4)(read_step_rows)  # neighboring episodes were mostly trained in neighboring steps
        return self._records(RowToken, lambda: self._of_episodes(where, match, lambda view: self._tokens(view, read)))

    def _metrics(self, names: tuple[str, ...]) -> Iterator[MetricValue]:
        unknown = set(names) - set(self._reader.metric_names()) if names else ()
        if unknown:
            raise InputError(f"{self.path}: no metric {sorted(unknown)[0]!r}; `metrics()` lists all that were recorded")
        for name, by_policy in self._reader.metrics(names or None).items():
            for policy, values in by_policy.items():
                for step, value in values:
                    yield MetricValue(name=name, policy=policy, step=step, value=value)

    def _keys(self, where: str, match: str) -> list[tuple[str, int]]:
        return self._reader.keys(where, among=episodes_with_words(self._reader, match) if match else None)

    def _episodes(self, where: str, match: str, fields: Sequence[str]) -> Iterator[EpisodeLine]:
        keys = self._keys(where, match)
        for start in range(0, len(keys), PAGE_EPISODES):
            yield from self._reader.lines(keys[start : start + PAGE_EPISODES], fields)

    def _of_episodes(
        self, where: str, match: str, read: Callable[[EpisodeView], Iterable[RecordT]]
    ) -> Iterator[RecordT]:
        for episode, attempt in self._keys(where, match):
            try:
                view = self._reader.episode(episode, attempt)
                records = list(read(view))
            except JournalError as error:
                self._report([str(error)], episode, attempt)
                continue
            yield from records

    def _steps(self) -> list[StepLine]:
        problems: list[str] = []
        steps = step_list(self._reader, problems=problems)
        self._add_problems(problems)
        return steps

    def _report(self, problems: list[str], episode: str, attempt: int) -> None:
        self._add_problems(f"{episode}.{attempt}: {problem}" for problem in problems)

    def _add_problems(self, problems: Iterable[str]) -> None:
        self.problems = list(dict.fromkeys([*self.problems, *problems]))

    def _turns(self, view: EpisodeView) -> Iterator[EpisodeTurn]:
        conversation = build_conversation(self._reader, view)
        key: dict[str, Any] = {"episode": view.summary.episode, "attempt": view.summary.attempt}
        self._report(conversation.problems, **key)
        for act in conversation.acts:
            if isinstance(act, PolicyTurn):
                yield EpisodeTurn(**asdict(act), **key)

    def _rewards(self, view: EpisodeView) -> Iterator[EpisodeReward]:
        conversation = build_conversation(self._reader, view)
        key: dict[str, Any] = {"episode": view.summary.episode, "attempt": view.summary.attempt}
        self._report(conversation.problems, **key)
        for act in conversation.acts:
            if isinstance(act, RewardAct):
                fields: dict[str, Any] = {
                    name: getattr(act, name) for name in ("seat", "index", "name", "value", "weight", "turn")
                }
                yield EpisodeReward(**fields, **key)

    def _tokens(self, view: EpisodeView, read: Any) -> Iterator[RowToken]:
        tokens = tokens_from_view(self._reader, view, read)
        key: dict[str, Any] = {"episode": tokens.episode, "attempt": tokens.attempt}
        self._report(tokens.problems, **key)
        for row in tokens.rows:
            shared = key | {name: getattr(row, name) for name in ("seat", "index", "policy", "row", "step")}
            for token in row.tokens:
                recorded = {name: values[token.position] for name, values in row.recorded.items()}
                yield RowToken(**asdict(token), **shared, recorded=recorded)


def open_run(path: str | Path) -> RecordedRun:
    """Open a run to read it, also while it runs, or if it came from someone else: nothing in it is executed.

    Args:
        path: the run's directory.

    Raises:
        InputError: there is no run at `path`.
        JournalError: the journal cannot be read.

    Example:
        >>> with agentrl.open_run("runs/demo") as run:  # doctest: +SKIP
        ...     curve = run.metrics("reward/mean").frame()
        ...     failures = [episode.task for episode in run.episodes("reward < 0.5")]
    """
    return RecordedRun(path)
