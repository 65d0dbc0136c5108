"""The tree of errors. A message says what happened, where (episode, turn, key), and what to do.

The command line maps the tree to exit codes (`exit_code`): 1 a check failed, 2 bad input, 70 internal, 74 storage, 130
interrupted. agentrl raises only `AgentRLError`s on purpose; any other exception is a bug of ours.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from agentrl.core.records import PolicyVersion, WeightsRef


class AgentRLError(Exception):
    """Base of all errors that agentrl raises on purpose. Errors travel between processes with all their attributes."""

    exit_code = 70

    def __reduce__(self) -> tuple[Callable[..., AgentRLError], tuple[object, ...], dict[str, object]]:
        return _without_init, (type(self), self.args), self.__dict__


ErrorT = TypeVar("ErrorT", bound=AgentRLError)


class CheckFailedError(AgentRLError):
    """A check that the user asked for (an environment, a ledger, a replay) failed."""

    exit_code = 1


class InputError(AgentRLError):
    """The user's input cannot be used; the message names the input and the fix."""

    exit_code = 2


class ConfigError(InputError):
    """A configuration key or value that does not exist or does not fit."""


class ModelError(InputError):
    """A model directory that lacks what training or sampling needs."""


class PredictionError(AgentRLError):
    """The memory of a run cannot be predicted. The run itself may be sound."""


class EnvironmentDefinitionError(InputError):
    """An environment class that cannot be registered or run: wrong seats, untyped tools, and the like."""


class GroupTooSmallError(InputError):
    """An advantage estimator cannot compare so few members; the group's units are dropped as `too_few_members`."""


class RunDirectoryError(InputError):
    """A run directory that exists, is missing, or belongs to a live process."""


class EnvironmentFaultError(AgentRLError):
    """Code of an environment broke the process it shares with the run: for example, it stopped the event loop, or
    cancelled tasks of others. The message names the episodes that were running."""

    exit_code = 1


class StorageError(AgentRLError):
    """The disk or a database failed: full, read-only, damaged."""

    exit_code = 74


class JournalError(StorageError):
    """A journal that is damaged, of another format version, or of another run."""


class EntriesError(JournalError):
    """The entries of an episode are damaged or contradict each other; other episodes can still be read."""


class UntrainableUnitsError(EntriesError):
    """Units of a batch cannot be trained; nothing of the batch was accumulated.

    Args:
        units: episode and attempt of each, with the reason.
    """

    def __init__(self, units: Sequence[tuple[str, int, str]]) -> None:
        super().__init__("; ".join(f"episode {episode} cannot be trained: {reason}" for episode, _, reason in units))
        self.units = tuple(units)


class PrunedDataError(JournalError):
    """The run discarded the requested data on purpose, by a rule of its configuration; nothing is damaged."""

    exit_code = 2


class EngineError(AgentRLError):
    """An engine cannot serve a request: it is dead or unreachable, or it lacks a capability."""


class EngineLostError(EngineError):
    """The engine failed and may recover: its process died, its socket closed.

    Tokens that `on_delta` received stay valid. Open the sessions again once `Engine.open` accepts them.
    """


class NoRoomError(EngineError):
    """The engine's KV cache has no room for a call now; `EngineSession.wait_for_room` waits for it."""


VERSION_GONE = "version_gone"
"""Drop reason of an episode that needs a version which no engine serves."""
SCORER_FAILED = "scorer_failed"
"""Drop reason of an episode, or of a whole group, that a scorer could not score."""
RUN_ENDED = "run_ended"
"""Drop reason of an episode or unit that the run did not need any more."""
EVALUATION_CUT = "evaluation_cut"
"""Drop reason of an evaluation episode whose process ended before it."""


class VersionNotServedError(EngineError):
    """A session asks for a version that the engine does not serve, or no longer serves."""


class GrammarRefusedError(EngineError):
    """The engine cannot enforce the grammar of a call; other calls are not affected."""


class GrammarNotCheckedError(EngineError):
    """The engine's machine could not check the grammar of a call; the same call may succeed later."""


class EngineStorageError(EngineError):
    """The disk of an engine's machine cannot take a version; engines on other machines may."""

    exit_code = 74


class EngineFailedError(EngineError):
    """The engine is gone for good: its supervisor has given up. The call sampled nothing."""


def version_refused_error(weights: WeightsRef, reason: str, kind: type[EngineError] = EngineError) -> EngineError:
    """Make the error for a version that is not served."""
    return kind(f"weights {weights.version} refused: {reason}. The version before it keeps serving")


class VersionsRefusedError(EngineError):
    """An engine cannot serve some of the requested versions; it serves the others."""

    def __init__(self, *, refused: Mapping[PolicyVersion, EngineError]) -> None:
        super().__init__("; ".join(map(str, refused.values())))
        self.refused = refused


class EngineCapabilityError(InputError):
    """The engine lacks a capability that the run needs; raised at start, with the alternatives."""


class TrainerError(AgentRLError):
    """A trainer refused or failed a step; its weights are as before the step."""


class TrainerLostError(TrainerError):
    """The trainer's process, or its Ray session, died: steps since the newest checkpoint are lost."""


class LossError(TrainerError):
    """A loss raised, or did not return a loss per token that depends on the batch."""

    exit_code = 2


class NonFiniteError(TrainerError):
    """A loss or gradient was NaN or infinite; the optimizer step was skipped."""


class EpisodeError(AgentRLError):
    """An episode cannot continue. `reason` becomes the episode's drop reason.

    Args:
        message: what happened and what to do.
        reason: the drop reason recorded in the journal.
        begin_again: the episode is sound, but its progress so far is useless: its next attempt, if there is one, plays
            from the start.
        advice: the part of `message` that says what to do, for those who give other advice.
    """

    exit_code = 1

    def __init__(self, message: str, *, reason: str, begin_again: bool = False, advice: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.begin_again = begin_again
        self.advice = advice


class InfrastructureError(AgentRLError):
    """Something that an episode needs was unavailable: a sandbox, a service, a machine.

    Raised by an environment's effects, tools, resources and programs. The episode retries with back-off from its last
    entry. If it makes no progress, it is dropped with the reason `infrastructure`. The failure never becomes a reward.
    """


def infrastructure_failure(error: BaseException) -> InfrastructureError | None:
    """Return the failure of infrastructure that an exception is, or that its group holds, as of a task group."""
    while isinstance(error, BaseExceptionGroup):
        failures = error.subgroup(InfrastructureError)
        if failures is None:
            return None
        error = failures.exceptions[0]
    return error if isinstance(error, InfrastructureError) else None


def recorded_error_type(error: str) -> str:
    """Return the type of an error that is recorded as `Type: message`."""
    return error.partition(":")[0]


class EffectError(EpisodeError):
    """An effect or a call on a resource raised; re-execution of `run` raises the same error.

    Args:
        message: description of the call.
        error: the error that it raised, as `Type: message`.
        location: the line of code that raised it, as `FILE:LINE in FUNCTION`, for messages only: it is empty if the
            error was recalled from the journal.
    """

    # Never raise it from the exception of the call: a re-execution has none, and `run` could take another branch.
    def __init__(self, message: str, *, error: str, location: str = "") -> None:
        super().__init__(f"{message}: {error}", reason="environment_error")
        self.error = error
        self.location = location

    @property
    def error_type(self) -> str:
        """Name of the type that the effect raised."""
        return recorded_error_type(self.error)


class RewardError(EpisodeError):
    """A reward that cannot be counted: not a finite real number, or not for a seat."""

    def __init__(self, message: str) -> None:
        super().__init__(message, reason="bad_reward")


class ScorerError(InputError):
    """A scorer answered something that is not a score: the run stops, because no episode is at fault."""


class ReplayMismatchError(EpisodeError):
    """Re-execution departed from the journal. The message names the call, both values, and the code then and now.

    Args:
        message: what the journal holds and what the code did now.
        code_changed: whether other code wrote the journal, so that the episode may restart under the present code.
        call_id: id of the call.
        advice: end of the message, which says what to do.
    """

    def __init__(self, message: str, *, code_changed: bool = False, call_id: str = "", advice: str = "") -> None:
        self.call_id = call_id
        super().__init__(message, reason="nondeterminism", begin_again=code_changed, advice=advice)


class GlobalRandomError(EpisodeError):
    """An episode's code drew from the process's random generators; the episode restarts with its own generators."""

    def __init__(self, episode_id: str) -> None:
        super().__init__(
            f"episode {episode_id} drew from `random` or `numpy.random`, as other episodes do, so that it could not be "
            "executed again. Draw from ctx.rng, or declare `own_random = True` on its environment",
            reason="global_random",
            begin_again=True,
        )


class UnstructuredConcurrencyError(EpisodeError):
    """An episode made a call from a task it did not start through `ctx.gather` or `ctx.spawn`."""

    def __init__(self, message: str) -> None:
        super().__init__(message, reason="unstructured_concurrency")


def format_foreign_error(error: BaseException) -> str:
    """Format a foreign error as `Type: message`. Formatting runs foreign code, which may itself fail."""
    try:
        message = str(error)
    except BaseException as second:  # noqa: BLE001 - the first error takes precedence
        message = f"(its text cannot be made: {type(second).__name__})"
    return f"{type(error).__name__}: {message}"


def describe_user_code_error(error: BaseException) -> str:
    """Describe an error of foreign code on one line, with the file and line that raised it."""
    return f"{format_foreign_error(error)}{describe_raise_location(error)}"


_LIBRARIES = tuple(
    {f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")}
)
_PACKAGE = f"{os.path.dirname(os.path.dirname(__file__))}/"
_OF_ANY_PYTHON = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/(?:python|pypy)3[\d.]*t?/")
"""Part of the file names of libraries, also of another interpreter's."""


def is_user_code(file: str) -> bool:
    """Whether a code file belongs to the user: not to agentrl or a library, nor generated (`<string>`: a dataclass's
    `__init__`)."""
    is_ours = file.startswith((_PACKAGE, *_LIBRARIES, "<frozen", "<string>", "<attrs generated"))
    return not is_ours and _OF_ANY_PYTHON.search(file) is None


def _code_of(environment: type | None) -> str:
    """Return the file of an environment's class, or the directory of its package; "" if it is agentrl's or unknown."""
    name = "" if environment is None else environment.__module__
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    if file.startswith(_PACKAGE):
        return ""
    for _ in range(name.count(".") + file.endswith("/__init__.py")):
        file = os.path.dirname(file.rstrip("/")) + "/"
    return file


def describe_raise_location(error: BaseException | None, environment: type | None = None) -> str:
    """Return ` at FILE:LINE in FUNCTION` for the innermost line of the user's code that an error passed, and the
    function of agentrl that it called. Without such a line: the innermost of agentrl, or of all; "" if unknown.

    An installed package is the user's code if it defines `environment`.
    """
    lines = [] if error is None else [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    installed = _code_of(environment)
    of_user = [
        n
        for n, (code, _) in enumerate(lines)
        if is_user_code(code.co_filename) or (installed and code.co_filename.startswith(installed))
    ]
    of_agentrl = [n for n, (code, _) in enumerate(lines) if code.co_filename.startswith(_PACKAGE)]
    for number in (of_user or of_agentrl or range(len(lines)))[-1:]:
        code, line = lines[number]
        called = lines[number + 1][0] if number + 1 < len(lines) else code
        is_of_agentrl = number in of_user and called.co_filename.startswith(_PACKAGE)
        return f" at {code.co_filename}:{line} in {code.co_name}" + f", calling {called.co_name}()" * is_of_agentrl
    return ""


def describe_failure_location(error: EpisodeError, environment: type | None) -> str:
    """Return ` at FILE:LINE in FUNCTION` for the user's code that ended an episode: the line that raised the cause or
    gave a bad reward, or the first line of the `reward` that returned one; "" if unknown."""
    if isinstance(error, EffectError):
        return f" at {error.location}" if error.location else ""
    if not isinstance(error, RewardError):
        cause = error.__cause__
        return "" if isinstance(cause, AgentRLError) else describe_raise_location(cause, environment)
    location = describe_raise_location(error, environment)
    code = getattr(getattr(environment, "reward", None), "__code__", None)
    if location.endswith(", calling reward()") or code is None or not is_user_code(code.co_filename):
        return location
    return f" at {code.co_filename}:{code.co_firstlineno} in {code.co_name}"


def _without_init(kind: type[AgentRLError], arguments: tuple[object, ...]) -> AgentRLError:
    """Rebuild a pickled error without `__init__`, which may need keywords that `args` lacks."""
    return kind.__new__(kind, *arguments)


def rebuild_error(kind: str, message: str, *, among: tuple[type[ErrorT], ...]) -> ErrorT:
    """Rebuild an error that another process met, by the name of its class.

    Args:
        kind: name of the class.
        message: its text.
        among: the allowed classes; the first is used if `kind` names none of them, or one that takes more than a
            message.
    """
    error_type = globals().get(kind)
    if isinstance(error_type, type) and issubclass(error_type, among):
        try:
            return error_type(message)
        except TypeError:
            pass
    return among[0](message)
