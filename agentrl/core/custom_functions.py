"""A user's losses, advantage estimators and scorers: marked, found, identified by their code, shipped to processes.

A process runs a *slice* of the function's file: the function, and the imports, definitions and constants of its module
that it refers to. So a script that calls `agentrl.train` can be shipped to other processes without starting a run
there, and changes to other parts of the script do not change the function. The digest of the slice identifies the code
in the journal. A function that differs from its definition in the file (a closure, a lambda, a patched
function) cannot be recorded or shipped, and is refused.

Owns: the marks, references, slices, digests. Does not own: which functions are built in (`credit.estimators`,
`learn.losses`), the use of the functions.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType
from typing import Any, Literal, NamedTuple, TypeVar, get_args, overload

from agentrl.core.errors import ConfigError
from agentrl.core.machine import PACKAGES
from agentrl.core.parts import Need, Property

Kind = Literal["loss", "advantage", "scorer"]
Grouping = Literal["token", "turn", "row", "agent", "episode", "group", "step"]
GROUPINGS: tuple[Grouping, ...] = get_args(Grouping)
"""What a token's loss may depend on, from the token itself to all tokens of the step; each contains the one before."""
BEYOND_EPISODE: tuple[Grouping, ...] = ("group", "step")
"""Groupings that reach beyond an episode: ranks exchange tokens, and a step holds whole groups."""
F = TypeVar("F", bound=Callable[..., Any])

ENTRY_POINTS: dict[Kind, str] = {
    "loss": "agentrl.losses",
    "advantage": "agentrl.advantages",
    "scorer": "agentrl.scorers",
}
"""Entry-point groups in which installed packages name their functions."""
_MARK = "__agentrl_mark__"


class FunctionDeclaration(NamedTuple):
    """The declaration that a decorator leaves on a function."""

    kind: Kind
    groups: Grouping = "step"
    """The tokens on which a token's loss depends: those with the same id, or the token alone. For losses only."""
    groups_option: str = ""
    """Option of the loss whose value replaces `groups`; empty: none does."""
    reference: bool = False
    """Whether the function reads `reference_logprobs`. For losses only."""
    divergence: bool = False
    """Whether the function reads `reference_kl`, and so `reference_logprobs`. For losses only."""
    over: Literal["group", "step", "tree"] = "group"
    """Agents that one call compares: "tree": those of a group, by their pieces. For advantages only."""
    gives: frozenset[Property] = frozenset()
    """Properties of a built-in function that do not follow from the other fields."""
    lacks: frozenset[Property] = frozenset()
    """Properties that most functions of its kind have, and this one has not."""
    needs: tuple[Need, ...] = ()
    """What a built-in function needs of other parts of the run."""

    def grouping(self, options: Mapping[str, Any]) -> Grouping:
        """Return the tokens on which a token's loss depends under these options.

        Raises:
            ConfigError: the value of `groups_option` is no grouping.
        """
        grouping = options.get(self.groups_option, self.groups)
        if grouping not in GROUPINGS:
            choices = ", ".join(GROUPINGS)
            raise ConfigError(f"trainer.loss.{self.groups_option} = {grouping!r}: expected one of {choices}")
        return grouping  # type: ignore[no-any-return]


@overload
def loss(function: F) -> F: ...
@overload
def loss(
    *, groups: Grouping = "step", groups_option: str = "", reference: bool = False, divergence: bool = False
) -> Callable[[F], F]: ...
def loss(
    function: Any = None,
    *,
    groups: Grouping = "step",
    groups_option: str = "",
    reference: bool = False,
    divergence: bool = False,
) -> Any:
    """Mark a function of a `LossBatch` as a loss, for `train(config, loss=…)` or `trainer.loss.name`.

    The function returns the loss of each token, shape [n] as `batch.logprobs`; agentrl sums it and divides by the
    normalizer. It is called once per step, with all tokens of the step, so its result cannot depend on how the step is
    split into micro-batches or ranks. It must be pure. Further parameters are set by further keys of `trainer.loss`.

    Args:
        function: the loss.
        groups: the tokens on which a token's loss depends: the token alone, those with the same id in the batch, or
            all of the step. A loss that groups by "token" is called per micro-batch, which saves a forward pass; up to
            "episode" ranks exchange nothing; only "token" and "turn" can be used with branches off policy.
        groups_option: option of the loss whose value replaces `groups`, which is its default.
        reference: whether the loss reads `batch.reference_logprobs`, which cost a forward pass.
        divergence: whether the loss reads `batch.reference_kl`, in addition to `batch.reference_logprobs`.

    Example:
        >>> @loss
        ... def reinforce(batch):
        ...     return -batch.advantages * batch.logprobs
    """
    mark = FunctionDeclaration(
        "loss", groups=groups, groups_option=groups_option, reference=reference or divergence, divergence=divergence
    )
    mark.grouping({})

    def decorate(decorated: Any) -> Any:
        if groups_option:
            option = inspect.signature(decorated).parameters.get(groups_option)
            if option is None or option.default != groups:
                raise ConfigError(
                    f"{decorated.__qualname__}: @agentrl.loss(groups={groups!r}, groups_option={groups_option!r}) "
                    f"needs an option {groups_option} with the default {groups!r}"
                )
        return _mark(decorated, mark)

    return decorate if function is None else decorate(function)


@overload
def advantage(function: F) -> F: ...
@overload
def advantage(*, over: Literal["group", "step", "tree"] = "group") -> Callable[[F], F]: ...
def advantage(function: Any = None, *, over: Literal["group", "step", "tree"] = "group") -> Any:
    """Mark a function of a `Group` as an advantage estimator, for `train(config, advantage=…)` or `credit.advantage`.

    The function returns one advantage per reward of the group, in order; for turn-level credit, one list per reward,
    with an advantage per turn. It must be pure. Further parameters are set by further keys of `credit.advantage`.

    Args:
        function: the estimator.
        over: the agents that one call compares: those of one group, or all of an optimizer step. With "tree" it gets
            the `pieces` of a group's agents and returns one list per agent, with a finite number per piece; only such
            functions can be used with `ctx.branch`.

    Example:
        >>> @advantage
        ... def centered(group):
        ...     mean = sum(group.rewards) / len(group.rewards)
        ...     return [reward - mean for reward in group.rewards]
    """
    mark = FunctionDeclaration("advantage", over=over)
    return _mark(function, mark) if function is not None else lambda decorated: _mark(decorated, mark)


def scorer(function: F) -> F:
    """Mark a function of a `Scored` as a scorer, for `train(config, scorers=[…])` or `scorers.NAME.function`.

    The function returns the score of one turn, or None to say nothing, which is not a zero. It may be a coroutine
    function. It runs during the episode, so it can use neither `ctx` nor an agent; an exception is retried
    (`scorers.NAME.attempts`). Further parameters are set by `scorers.NAME.options`.

    Example:
        >>> @scorer
        ... def short(scored):
        ...     return 1.0 - len(scored.turn.text.split()) / 100
    """
    return _mark(function, FunctionDeclaration("scorer"))


def _mark(function: F, mark: FunctionDeclaration) -> F:
    setattr(function, _MARK, mark)
    return function


def declaration_of(function: Callable[..., Any]) -> FunctionDeclaration:
    """Return the declaration that the function's decorator left.

    Raises:
        ConfigError: the function has no decorator.
    """
    mark = getattr(function, _MARK, None)
    if not isinstance(mark, FunctionDeclaration):
        name = getattr(function, "__qualname__", repr(function))
        raise ConfigError(
            f"{name} is no loss, advantage or scorer: put @agentrl.loss, @agentrl.advantage or @agentrl.scorer above it"
        )
    return mark


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCode:
    """The code of a user's function, for the journal and for other processes."""

    reference: str
    """`module:function` of an installed package, or `/path/to/file.py:function`."""
    digest: str
    """Digest of the function and of everything that it refers to in its file."""
    source: str | None = None
    """Content of the file; None: the function is installed, and every process imports its own."""

    @property
    def name(self) -> str:
        """Name of the function."""
        return self.reference.rpartition(":")[2]

    def load(self) -> Callable[..., Any]:
        """Return the function, compiled from its slice if it is in a file.

        Raises:
            ConfigError: the code raised, or the installed function is not that of the process that recorded it.
        """
        location, _, name = self.reference.rpartition(":")
        if self.source is not None:
            function = _execute(_Slice(self.source, location, name), self.digest)[name]
        else:
            function = getattr(_import(location, self.reference), name)
            installed_digest = _Slice(_text_of(function, self.reference), location, name).digest
            if installed_digest != self.digest:
                raise ConfigError(
                    f"{self.reference}: the code installed here ({installed_digest}) is not the code that was given "
                    f"({self.digest}): install the same version on every machine"
                )
        return function  # type: ignore[no-any-return]


def installed_functions(kind: Kind) -> dict[str, str]:
    """Return the functions that installed packages provide, as `module:function` keyed by name."""
    return {point.name: point.value for point in importlib.metadata.entry_points(group=ENTRY_POINTS[kind])}


def find_function_code(kind: Kind, reference: str, *, key: str, runs: bool = True) -> FunctionCode:
    """Return the code of a function; see `find_function`. With `runs = False`, a file is only read: whether it defines
    such a function is not known."""
    file, _, name = reference.rpartition(":")
    if not runs and file.endswith(".py") and "\0" not in file:
        return _code_of_file(Path(file).resolve(), name)
    return find_function(kind, reference, key=key)[0]


def find_function(kind: Kind, reference: str, *, key: str) -> tuple[FunctionCode, Callable[..., Any]]:
    """Find a function and its code, by its name in an entry point, `module:function` or `path/to/file.py:function`.

    Args:
        kind: expected kind.
        reference: the reference.
        key: the setting, for messages.

    Raises:
        ConfigError: the reference names nothing, or something that is not marked as `kind`, or cannot be recorded.
    """
    reference = installed_functions(kind).get(reference, reference)
    location, _, name = reference.rpartition(":")
    if not (location and name.isidentifier()) or "\0" in location:
        raise ConfigError(f"{key} = {reference!r}: give `module:function` or `path/to/file.py:function`")
    if location.endswith(".py"):
        path = Path(location).resolve()
        if not path.is_file():
            raise ConfigError(f"{key}: there is no file {path}")
        code = _code_of_file(path, name)
    else:
        module = _import(location, key)
        if not hasattr(module, name):
            raise ConfigError(f"{key}: {location} defines no function {name!r} at its top level")
        code = capture_function_code(getattr(module, name), kind, key=key)
    function = code.load()
    if (actual_kind := declaration_of(function).kind) != kind:
        raise ConfigError(f"{key}: {reference} is marked as {actual_kind}; put @agentrl.{kind} above it")
    return code, function


def capture_function_code(function: object, kind: Kind, *, key: str) -> FunctionCode:
    """Return the code of a function of this process.

    Raises:
        ConfigError: the function is not marked as `kind`, or differs from its definition in the file.
    """
    if not inspect.isfunction(function):
        raise ConfigError(f"{key}: {function!r} is not a function that a module defines with `def`")
    if (actual_kind := declaration_of(function).kind) != kind:
        raise ConfigError(f"{key}: {function.__qualname__} is marked as {actual_kind}; put @agentrl.{kind} above it")
    name, module = function.__qualname__, sys.modules.get(function.__module__)
    if function.__closure__ or not name.isidentifier():
        raise ConfigError(
            f"{key}: {name} is a closure, a lambda or a method, and its code alone does not determine what it "
            "computes: define it at the top level of a file, and pass its parameters as options"
        )
    text = _text_of(function, name)
    file = str(Path(inspect.getsourcefile(function) or "").resolve())
    if function.__module__ != "__main__" and _is_installed(function.__module__):
        part = _Slice(text, function.__module__, name)
        code = FunctionCode(reference=f"{function.__module__}:{name}", digest=part.digest)
    else:
        code = _code_of_file(Path(file), name)
        part = _Slice(text, file, name)
    _check_live(part, vars(module) if module is not None else {}, key)
    return code


def _code_of_file(path: Path, name: str) -> FunctionCode:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    part = _Slice(text, str(path), name)
    part.check_imports()
    return FunctionCode(reference=f"{path}:{name}", digest=part.digest, source=text)


def _text_of(function: Callable[..., Any], name: str) -> str:
    """Return the content of the file that defines a function.

    Raises:
        ConfigError: the function was defined in a shell or a notebook.
    """
    file = inspect.getsourcefile(function)
    if file is None or not Path(file).is_file():
        raise ConfigError(f"{name} was not defined in a file, so it cannot be recorded or shipped: define it in a file")
    return Path(file).read_text(encoding="utf-8")


def check_options(function: Callable[..., Any], options: Mapping[str, Any], key: str) -> None:
    """Refuse options that are not parameters of the function, and required parameters without an option.

    Raises:
        ConfigError: an option does not fit; the message lists the function's options.
    """
    parameters = list(inspect.signature(function).parameters.values())[1:]
    names = [parameter.name for parameter in parameters]
    try:
        inspect.signature(function).bind(None, **options)
    except TypeError as error:
        raise ConfigError(f"{key}: {function.__name__}: {error}; its options: {', '.join(names) or 'none'}") from None
    for parameter in parameters:
        default, value = parameter.default, options.get(parameter.name)
        kind = (int, float) if isinstance(default, float) else type(default)
        if value is None or default is parameter.empty or default is None:
            continue
        if not isinstance(value, kind) or (isinstance(value, bool) and not isinstance(default, bool)):
            raise ConfigError(f"{key}.{parameter.name} = {value!r}: expected {type(default).__name__}")


class _Slice:
    """The statements of a module that a function needs, in their order: those that bind its name, or a name that one of
    them mentions.

    Raises:
        ConfigError: the text is not Python, or does not define the function.
    """

    def __init__(self, text: str, location: str, name: str) -> None:
        self.location = location
        try:
            body = ast.parse(text, location).body
        except SyntaxError as error:
            raise ConfigError(f"{location}:{error.lineno}: {error.msg}") from None
        needed_names, indices = {name}, set[int]()
        grew = True
        while grew:
            grew = False
            for index, statement in enumerate(body):
                if index in indices or not (
                    needed_names & set(_bound(statement)) or getattr(statement, "module", "") == "__future__"
                ):
                    continue
                indices.add(index)
                needed_names |= {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
                grew = True
        self.statements = [body[index] for index in sorted(indices)]
        """The needed statements, and every `from __future__` import."""
        self.names = [bound for statement in self.statements for bound in _bound(statement)]
        if name not in self.names:
            raise ConfigError(f"{location} defines no function {name!r} at its top level")
        words = "\n".join(map(ast.unparse, self.statements))
        self.digest = hashlib.blake2b(words.encode("utf-8", "replace"), digest_size=8).hexdigest()

    def check_imports(self) -> None:
        """Refuse imports of files that would not be shipped.

        Raises:
            ConfigError: such an import exists; the message names the module.
        """
        for statement in self.statements:
            for node in ast.walk(statement):
                modules: list[str] = []
                if isinstance(node, ast.Import):
                    modules = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    modules = ["." * node.level + (node.module or "")]
                for module in modules:
                    if not _is_installed(module):
                        raise ConfigError(
                            f"{self.location} imports {module}, which is not an installed package, so its code would "
                            "be neither recorded nor shipped: put what the function needs into its own file, or "
                            "install the package and give `module:function`"
                        )


def _bound(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement at the top level of a module binds; none for a statement that starts a
    program.
    """
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in names)
        case ast.If(test=test) if any(isinstance(n, ast.Name) and n.id == "__name__" for n in ast.walk(test)):
            return
        case ast.If() | ast.Try() | ast.With():
            for inner in ast.iter_child_nodes(statement):
                for child in inner.body if isinstance(inner, ast.ExceptHandler) else [inner]:
                    if isinstance(child, ast.stmt):
                        yield from _bound(child)
        case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
            yield from (n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))


class _SliceLoader(InspectLoader):
    """Imports the statements of a slice as a module."""

    def __init__(self, part: _Slice) -> None:
        self._part = part

    def get_source(self, fullname: str) -> None:
        """Return None: the statements keep the line numbers of their file, so a traceback shows that."""

    def get_code(self, fullname: str) -> CodeType:
        """Compile the statements."""
        body = ast.Module(body=self._part.statements, type_ignores=[])
        return compile(body, self._part.location, "exec", dont_inherit=True)


def _execute(part: _Slice, digest: str) -> dict[str, Any]:
    """Execute the statements of a slice in a new module, and return the names they define.

    Raises:
        ConfigError: a statement raised.
    """
    loader = _SliceLoader(part)
    module = importlib.util.module_from_spec(ModuleSpec(f"agentrl_function_{digest}", loader))
    module.__dict__["__file__"] = part.location
    if not part.location.endswith(".py"):  # import an installed module by name, so that its relative imports work
        module.__dict__["__package__"] = part.location.rpartition(".")[0]
    sys.modules[module.__name__] = module
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{part.location}: cannot be loaded: {type(error).__name__}: {error}") from error
    return vars(module)


def _check_live(part: _Slice, live: dict[str, Any], key: str) -> None:
    """Refuse a function whose module no longer holds what its file defines.

    Raises:
        ConfigError: a name differs; the message names it.
    """
    namespace = _execute(part, part.digest)
    for name in part.names:
        if is_monkeypatched(namespace.get(name), live.get(name)):
            raise ConfigError(
                f"{key}: {name} differs from what {part.location} defines: it was replaced in this process, or the "
                "file was edited after the import. Only the file is recorded and shipped: make the change there"
            )


def is_monkeypatched(original: object, live: object) -> bool:
    """Whether a module's name was rebound: it differs from what a fresh execution of the module's file binds."""
    if original is live:
        return False
    if inspect.isfunction(original):
        code, live_function = inspect.unwrap(original).__code__, inspect.unwrap(live) if callable(live) else None
        return not inspect.isfunction(live_function) or live_function.__code__ != code
    if inspect.isclass(original):
        methods = [(name, method) for name, method in vars(original).items() if inspect.isfunction(method)]
        return not inspect.isclass(live) or any(
            is_monkeypatched(method, vars(live).get(name)) for name, method in methods
        )
    return isinstance(original, int | float | str | tuple) and original != live


def _import(module: str, key: str) -> Any:
    """Import a module, also from the working directory.

    Raises:
        ConfigError: there is no such module, or its code raised.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        directory = str(Path.cwd())
        if error.name == module.partition(".")[0] and directory not in sys.path:
            sys.path.append(directory)  # a console script, unlike `python -m`, does not look in the working directory
            return _import(module, key)
        raise ConfigError(f"{key}: there is no module {error.name}") from None
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{key}: cannot import {module}: {type(error).__name__}: {error}") from error


def _is_installed(module: str) -> bool:
    """Whether a module is of the standard library or of an installed distribution."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top in (__name__.partition(".")[0], builtins.__name__, *PACKAGES):
        return True
    try:
        spec = importlib.util.find_spec(top) if top else None
    except (ImportError, ValueError):
        return False
    places = [spec.origin or "", *(spec.submodule_search_locations or ())] if spec is not None else []
    if any({"site-packages", "dist-packages"} & set(Path(place).parts) for place in places):
        return True
    return bool(places) and top in importlib.metadata.packages_distributions()
