"""Decides from source text whether an environment could depend on string hashes, which differ between processes.

Finding out by experiment takes several processes. Most environments build no set that they iterate, and are done here.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from agentrl.core.errors import is_user_code
from agentrl.environment.environment import Environment
from agentrl.environment.tools import ToolEnvironment

_HASHING = {"set", "frozenset", "hash", "eval", "exec", "__import__", "import_module", "WeakSet"}
_SETS = {"set", "frozenset"}
_ORDERLESS = {"sorted", "len", "min", "max", "any", "all", "bool"}
"""Functions whose result does not depend on the order of a set, for elements that they can compare. With `key`, some of
them keep the order of equal elements; a `sum` of floats depends on their order."""
_ORDERED_LIBRARIES = {*sys.stdlib_module_names, "agentrl", "numpy", "msgspec", "pydantic"}
_SET_OPERATORS = (ast.BitAnd, ast.BitOr, ast.BitXor, ast.Sub)


def may_depend_on_hash_order(environment: type[Environment]) -> bool:
    """Whether the code of an environment, with the modules it imports, could iterate a set or call `hash`.

    Libraries are not read: an environment that imports one, apart from a few known ones, could.
    """
    own_modules = {Environment.__module__, ToolEnvironment.__module__}
    pending = [base.__module__ for base in environment.__mro__ if base is not object]
    read_names = {*own_modules, "abc", "typing"}
    while pending:
        name = pending.pop()
        if name in read_names:
            continue
        read_names.add(name)
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if module is None or file is None or not is_user_code(file) or not file.endswith(".py"):
            return True
        tree = ast.parse(Path(file).read_bytes())
        if iterates_sets(tree):
            return True
        pending += _imported_names(tree, module)
    return False


def iterates_sets(tree: ast.AST) -> bool:
    """Whether code could depend on the order of a set. Membership, and functions such as `sorted`, do not.

    Example:
        >>> iterates_sets(ast.parse("x in {'a', 'b'} or len(set(y)) or sorted({*z})"))
        False
        >>> iterates_sets(ast.parse("[*{'a', 'b'}]")), iterates_sets(ast.parse("sorted({*z}, key=len)"))
        (True, True)
    """
    harmless: set[int] = set()
    for node in ast.walk(tree):
        operands: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            operands = [*node.comparators, *([] if isinstance(node.ops[0], ast.In | ast.NotIn) else [node.left])]
        elif isinstance(node, ast.Call) and _is_orderless(node):
            operands = node.args
        harmless.update(map(id, operands))
        calls = [operand.func for operand in operands if isinstance(operand, ast.Call)]
        harmless.update(id(function) for function in calls if isinstance(function, ast.Name) and function.id in _SETS)
    for node in ast.walk(tree):
        if id(node) in harmless:
            continue
        match node:
            case ast.Set() | ast.SetComp():
                return True
            case ast.Name(id=name) | ast.Attribute(attr=name) if name in _HASHING:
                return True
            case ast.BinOp(op=operator) if isinstance(operator, _SET_OPERATORS):
                if any(_is_view(side) for side in (node.left, node.right)):
                    return True
    return False


def _is_orderless(call: ast.Call) -> bool:
    """Whether the result of a call does not depend on the order of its arguments' elements."""
    has_key = any(keyword.arg in {"key", None} for keyword in call.keywords)  # None: `**options`
    return isinstance(call.func, ast.Name) and call.func.id in _ORDERLESS and not has_key


def _is_view(node: ast.expr) -> bool:
    """Whether an expression is `….keys()` or `….items()`, whose operators make sets."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in {"keys", "items"}


def _imported_names(tree: ast.AST, module: ModuleType) -> Iterator[str]:
    """Yield the modules that code imports, except libraries whose results have an order."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = (module.__package__ or "").split(".")
            package = parents[: len(parents) - node.level + 1] if node.level else []
            name = ".".join([*filter(None, package), *([node.module] if node.module else [])])
            names = [name, *(f"{name}.{alias.name}" for alias in node.names if f"{name}.{alias.name}" in sys.modules)]
        else:
            continue
        yield from (name for name in names if name.partition(".")[0] not in _ORDERED_LIBRARIES)
