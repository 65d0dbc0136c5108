"""The tests: what they cost, and which planted faults they find, beside those of an earlier commit; the project's size.

    python -m benchmarks.suite [--part cpu|faults|size] [--against COMMIT] [--folder tests/unit …] [--faults 40]

Both commits, `--against` and `HEAD`, are checked out into temporary directories and tested with this `.venv`.

* `cpu`. `suite_cpu_seconds`: CPU seconds of what `make test` runs, with all processes that it starts, also those that
  outlive their parents; `suite_cpu_ratio`: over those of the earlier commit, in the same hour. Folder by folder, one
  commit after the other; `--folder` measures some of them. An hour and a half in full on two quiet cores.
* `faults`. `faults_found` of `faults`: faults drawn at random from functions that are the same in both commits (a
  statement removed, a condition inverted), found by the earlier commit's tests, and tried with those of `HEAD`. A draw
  that the earlier tests miss does not count. Of each commit, only test files in `FOLDERS` are tried, the `MAX_FILES` of
  them that are nearest to the changed module: they import it, or a module that imports it, and are named like it. So a
  fault that only another file finds is not drawn, and one counts as missed even if another file would find it. Tests
  that start Ray, vLLM or whole runs are left out, and those of engines. Two minutes a fault.
* `size`. What a reader has to know, as `tests/architecture/size.py` counts it: `code_lines` and `conditionals` of
  `agentrl/`, `settings`, `refused_pairs` of settings, `docs_words`, `readme_words`.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import ctypes
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks.report import ROOT, Report
from tests.architecture.size import measured_sizes
from tests.processes import descendants

SUITE = ("tests/e2e", "tests/learning", "tests/contract", "tests/sim", "tests/property", "tests/replay", "tests/unit")
SUITE = (*SUITE, "tests/architecture", "environments", "packages")
FOLDERS = ("tests/unit", "tests/property", "tests/sim", "tests/replay")
MAX_FILES = 6
"""Test files tried per fault."""
QUICK_TESTS = "not (exhaustive or e2e or learning or slow or vllm or ray)"
LIMIT_S = 600
"""Time limit of the tests of one fault; a fault that makes them exceed it is found."""
_PR_SET_CHILD_SUBREAPER = 36
_SIMPLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.Raise, ast.Delete)


@contextlib.contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """Check a commit out into a temporary directory."""
    with tempfile.TemporaryDirectory(prefix="agentrl-suite-") as place:
        tree = Path(place, "tree")
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, commit], cwd=ROOT, check=True)
        try:
            if (ROOT / "models").is_dir():
                (tree / "models").symlink_to((ROOT / "models").resolve())
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)


def run_tests(tree: Path, arguments: Sequence[str], limit_s: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run pytest in a checkout; its processes import the checkout's packages, wherever they start.

    Raises:
        subprocess.TimeoutExpired: the tests took longer than the limit.
    """
    sources = [tree, *sorted(tree.glob("packages/*/src"))]
    environ = {"HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": os.pathsep.join(map(str, sources))}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    process = subprocess.Popen(
        command,
        cwd=tree,
        env=os.environ | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return subprocess.CompletedProcess(command, process.returncode, output)


# --- cpu --------------------------------------------------------------------------------------------------------------


def cpu_seconds(tree: Path, folder: str) -> float:
    """Return the CPU seconds of a folder's tests and of all processes that they start."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = run_tests(tree, ["-n", "3", "--dist", "loadfile", "--no-loadscope-reorder", "-m", "not exhaustive", folder])
    _end_orphans()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    lines = done.stdout.splitlines()
    for line in [*(line for line in lines if line.startswith(("FAILED ", "ERROR "))), lines[-1]]:
        print(f"  {line}", flush=True)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _end_orphans() -> None:
    """End the processes that outlived their parents, which have become children of this one, and count their time."""
    while orphans := set(descendants(os.getpid())) - {os.getpid()}:
        for orphan in orphans:
            with contextlib.suppress(ProcessLookupError):
                os.kill(orphan, signal.SIGKILL)
        os.waitpid(-1, 0)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def cpu(arguments: argparse.Namespace) -> dict[str, float | None]:
    """Measure both suites, folder by folder."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    sums = [0.0, 0.0]
    with checkout(arguments.against) as old, checkout("HEAD") as new:
        for folder in arguments.folder or SUITE:
            seconds = [cpu_seconds(tree, folder) if (tree / folder).is_dir() else 0.0 for tree in (old, new)]
            sums = [before + more for before, more in zip(sums, seconds, strict=True)]
            print(f"{folder}: {seconds[0]:.0f} -> {seconds[1]:.0f} CPU seconds", flush=True)
    return {"suite_cpu_seconds": sums[1], "suite_cpu_ratio": sums[1] / sums[0]}


# --- faults -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fault:
    """A change of one function."""

    module: str
    """Path of its file in the checkout."""
    function: str
    """Its name in the module, with those of its classes."""
    node: int
    """Number of the changed statement among those that `changeable` finds."""

    def plant(self, tree: Path) -> str:
        """Change the module's file; return what was changed."""
        path = tree / self.module
        text = path.read_text(encoding="utf-8")
        statement = changeable(functions(ast.parse(text))[self.function])[self.node]
        changed = statement.test if isinstance(statement, ast.If | ast.While) else statement
        lines = text.encode().splitlines(keepends=True)
        start = sum(map(len, lines[: changed.lineno - 1])) + changed.col_offset
        end = sum(map(len, lines[: (changed.end_lineno or 0) - 1])) + (changed.end_col_offset or 0)
        source = text.encode()[start:end]
        replacement = b"pass" if changed is statement else b"(not (" + source + b"))"
        path.write_bytes(text.encode()[:start] + replacement + text.encode()[end:])
        verb = "removed" if changed is statement else "inverted"
        return f"{self.module}:{changed.lineno} {self.function}: {verb} {' '.join(source.decode().split())[:80]}"


def functions(tree: ast.Module) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return the functions of a module and its classes, by name."""
    found = {}

    def visit(body: Sequence[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found[prefix + node.name] = node
            elif isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")

    visit(tree.body, "")
    return found


def changeable(function: ast.AST) -> list[ast.stmt]:
    """Return the statements of a function that can be removed, or whose condition can be inverted."""
    return [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.If | ast.While)
        or (isinstance(node, _SIMPLE) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)))
    ]


def possible_faults(old: Path, new: Path) -> list[Fault]:
    """Return the faults in functions that both commits have unchanged."""
    found = []
    for path in sorted(old.glob("agentrl/**/*.py")):
        module = str(path.relative_to(old))
        if (new / module).exists():
            ours, theirs = (functions(ast.parse((tree / module).read_text())) for tree in (new, old))
            for name in ours.keys() & theirs.keys():
                if ast.dump(ours[name]) == ast.dump(theirs[name]):
                    found += [Fault(module, name, number) for number in range(len(changeable(ours[name])))]
    return sorted(found, key=lambda fault: (fault.module, fault.function, fault.node))


@cache
def imports(path: Path) -> frozenset[str]:
    """Return the modules that a file names in imports, and the names that it takes from them."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update({node.module, *(f"{node.module}.{name.name}" for name in node.names)})
    return frozenset(found)


def nearest_tests(tree: Path, module: str) -> list[str]:
    """Return the test files that are nearest to a module, the nearest first."""
    name = module.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    importers = {
        str(path.relative_to(tree)).removesuffix(".py").replace("/", ".")
        for path in tree.glob("agentrl/**/*.py")
        if name in imports(path)
    }
    words = set(re.split(r"[._]", name)) - {"agentrl"}

    def distance(path: Path) -> tuple[bool, int, int]:
        return (name not in imports(path), -len(words & set(path.stem.split("_"))), path.stat().st_size)

    near = [
        path
        for folder in FOLDERS
        for path in sorted((tree / folder).glob("test_*.py"))
        if name in imports(path) or importers & imports(path)
    ]
    return [str(path.relative_to(tree)) for path in sorted(near, key=distance)[:MAX_FILES]]


def finding_test(tree: Path, fault: Fault) -> str | None:
    """Return a test that fails with the fault and passes without it; None if none does."""
    tests = nearest_tests(tree, fault.module)
    if not tests:
        return None
    source = (tree / fault.module).read_bytes()
    fault.plant(tree)
    try:
        done = run_tests(tree, ["-n", "0", "-x", "--tb=no", "-o", "timeout=120", "-m", QUICK_TESTS, *tests], LIMIT_S)
    except subprocess.TimeoutExpired:
        return "a test that hangs"
    finally:
        (tree / fault.module).write_bytes(source)
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if failed is None and done.returncode == 0:
        return None
    again = [failed[1]] if failed else ["--collect-only", *tests]
    passes = run_tests(tree, ["-n", "0", "--tb=no", "-m", QUICK_TESTS, *again], LIMIT_S).returncode == 0
    return (failed[1] if failed else "tests that do not start") if passes else None


def faults(arguments: argparse.Namespace) -> dict[str, float | None]:
    """Plant faults until the earlier tests have found so many, and try each with the tests of `HEAD`."""
    draw, num_found, num_tried = random.Random(arguments.seed), 0, 0
    print(f"seed {arguments.seed}", flush=True)
    with checkout(arguments.against) as old, checkout("HEAD") as new:
        possible = possible_faults(old, new)
        while num_tried < arguments.faults:
            fault = draw.choice(possible)
            before = finding_test(old, fault)
            if before is None:
                print(f"not found before: {fault}", flush=True)
                continue
            num_tried += 1
            source = (new / fault.module).read_bytes()
            text = fault.plant(new)
            (new / fault.module).write_bytes(source)
            after = finding_test(new, fault)
            num_found += after is not None
            print(f"{text}\n  before: {before}\n  now: {after or 'NOT FOUND'}", flush=True)
    return {"faults": float(num_tried), "faults_found": float(num_found)}


# --- size -------------------------------------------------------------------------------------------------------------

SIZE_FIGURES = {
    "code_lines": "lines in all",
    "conditionals": "conditionals",
    "settings": "settings",
    "refused_pairs": "refused pairs",
    "docs_words": "words of docs/",
    "readme_words": "words of README.md",
}


def size(arguments: argparse.Namespace) -> dict[str, float | None]:
    """Count this checkout."""
    sizes = measured_sizes()
    for name, count in sorted(sizes.items()):
        print(f"{count:>8,}  {name}")
    return {figure: float(sizes[name]) for figure, name in SIZE_FIGURES.items()}


PARTS = {"cpu": cpu, "faults": faults, "size": size}


def main() -> None:
    """Run the parts, and print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the tests of architecture, and one fault")
    parser.add_argument("--part", choices=PARTS, help="this part only")
    parser.add_argument("--against", default="1e57498d", help="the earlier commit")
    parser.add_argument("--folder", action="append", choices=SUITE, help="measure this folder only; may be repeated")
    parser.add_argument("--faults", type=int, default=40, help="number of faults that the earlier tests find")
    parser.add_argument("--seed", type=int, default=1, help="of the draw of faults")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.folder, arguments.faults = ["tests/architecture"], 1
    report = Report("suite", quick=arguments.quick, repeats=1, compared_with=arguments.against)
    report.figures = dict.fromkeys(("suite_cpu_seconds", "suite_cpu_ratio", "faults", "faults_found", *SIZE_FIGURES))
    for part in [arguments.part] if arguments.part else PARTS:
        print(f"{part} …", flush=True)
        report.figures |= PARTS[part](arguments)
    report.print()


if __name__ == "__main__":
    main()
