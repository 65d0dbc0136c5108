"""Whether what README and docs/ say is true: `python -m benchmarks.claims`.

`claims.toml` has a row per claim: a `file`, what it `says` word for word, and what proves it:

* `tests`: tests that fail if it is false; they run;
* `command`, a regular expression of what it `prints`, and `cpu_seconds`, an upper bound: it runs in an empty directory;
* `value` and `is`: a constant of the code, or the length of a collection;
* `source` and `has`: a file of this repository, and texts in it;
* `generated`: the function of docs/generators/peers.py that writes the sentence from docs/peers.json;
* `quotes`, the address of another project's words, and `on`, the date they were read: nothing here can prove these.

`claims`: rows. `claims_false`: rows whose sentence is not in its file, or whose proof fails. `claims_quoted`: rows that
quote. `claims_unsourced`: numbers in README's text that no row covers. A quick run leaves out tests and commands, which
the suite and a reader run.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import resource
import shlex
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks import parts
from docs.generators import peers

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("claims", "claims_false", "claims_quoted", "claims_unsourced")
PROOFS = ("tests", "command", "value", "source", "generated", "quotes")

Claim = Mapping[str, Any]


def claims() -> list[Claim]:
    """The rows of claims.toml, with the sentences that are generated."""
    rows: list[Claim] = tomllib.loads((ROOT / "benchmarks" / "claims.toml").read_text(encoding="utf-8"))["claim"]
    line = json.loads(_text(ROOT / "docs" / "peers.json"))
    return [{**row, "says": getattr(peers, row["generated"])(line)} if "generated" in row else row for row in rows]


def pages(rows: Sequence[Claim]) -> dict[str, str]:
    """The texts of the files that the rows name."""
    return {name: (ROOT / name).read_text(encoding="utf-8") for name in sorted({row["file"] for row in rows})}


def unsaid(rows: Sequence[Claim], texts: Mapping[str, str]) -> list[str]:
    """The claims that their page does not make."""
    words = {name: " ".join(text.split()) for name, text in texts.items()}
    return [
        f"{row['file']} does not say: {row['says']}"
        for row in rows
        if " ".join(row["says"].split()) not in words[row["file"]]
    ]


def contradicted(rows: Sequence[Claim]) -> list[str]:
    """The claims that the code or a file of the repository contradicts, and those without a proof."""
    return [f"{row['file']}: {row['says']}: {reason}" for row in rows if (reason := _contradiction(row))]


def _contradiction(row: Claim) -> str:
    if sum(proof in row for proof in PROOFS) != 1 or ("quotes" in row and not row.get("on")):
        return f"a row has one of {', '.join(PROOFS)}, and a quotation its date"
    for test in row.get("tests", ()):
        path, _, name = test.partition("::")
        file = ROOT / path
        if not file.exists() or not re.search(rf"^(async )?(def|class) {name}\b|^{name} = ", _text(file), re.MULTILINE):
            return f"there is no test {test}"
    if "value" in row:
        module, _, name = row["value"].partition(":")
        value = getattr(importlib.import_module(module), name)
        value = len(value) if hasattr(value, "__len__") and not isinstance(value, str) else value
        return "" if value == row["is"] else f"{row['value']} is {value}, not {row['is']}"
    lacking = [text for text in row.get("has", ()) if text not in _text(ROOT / row["source"])]
    return f"{row['source']} lacks {lacking}" if lacking else ""


def failed_tests(rows: Sequence[Claim], root: Path = ROOT) -> list[str]:
    """The claims of which a test under `root` fails, is skipped, or does not exist. The tests run, in one process."""
    tests = sorted({test for row in rows for test in row.get("tests", ())})
    pytest = (sys.executable, "-m", "pytest", "-q", "-rA", "-m", "not exhaustive", *tests)
    printed = subprocess.run(pytest, cwd=root, capture_output=True, text=True, check=False).stdout if tests else ""
    outcomes = re.findall(r"^(PASSED|FAILED|ERROR|SKIPPED) (\S+)", printed, re.MULTILINE)

    def failure(test: str) -> str:
        named = {outcome for outcome, name in outcomes if f"{name}[".startswith((f"{test}[", f"{test}::"))}
        return "" if named == {"PASSED"} else f"{test}: {', '.join(sorted(named)) or 'did not run'}"

    failures = {test: failure(test) for test in tests}
    return [
        f"{row['file']}: {row['says']}: {failures[test]}"
        for row in rows
        for test in row.get("tests", ())
        if failures[test]
    ]


def failed_commands(rows: Sequence[Claim]) -> list[str]:
    """The claims whose command fails, prints something else, or takes longer. Each command runs once."""
    wrong = []
    with tempfile.TemporaryDirectory() as directory:
        for command in dict.fromkeys(row["command"] for row in rows if "command" in row):
            status, printed, seconds = _run(command, Path(directory))
            for row in rows:
                if row.get("command") != command:
                    continue
                if status or not re.search(row["prints"], printed):
                    wrong.append(f"{row['file']}: {row['says']}: {command} ended with {status}: {printed[-2000:]}")
                if seconds > row.get("cpu_seconds", seconds):
                    wrong.append(f"{row['file']}: {row['says']}: {command} took {seconds:.0f} CPU s")
    return wrong


def _run(command: str, directory: Path) -> tuple[int, str, float]:
    """A command's exit status, what it prints, and its CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    (directory / "examples").unlink(missing_ok=True)
    (directory / "examples").symlink_to(ROOT / "examples")
    ended = subprocess.run(
        shlex.split(command), cwd=directory, env=environment, capture_output=True, text=True, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return ended.returncode, ended.stdout + ended.stderr, seconds


def unsourced(rows: Iterable[Claim], readme: str) -> list[str]:
    """The words with a number in README's text that no claim covers."""
    prose = " ".join(re.sub(r"^```.*?^```$|\]\([^)]*\)|`[^`]*`", " ", readme, flags=re.DOTALL | re.MULTILINE).split())
    covered = " ".join(row["says"] for row in rows if row["file"] == "README.md")
    covered = " ".join(re.sub(r"\]\([^)]*\)|`[^`]*`", " ", covered).split())
    numbers = {match[0] for match in re.finditer(r"[^ ]*\d[^ ]*", prose)}
    return [f"README.md: nothing covers {word}" for word in sorted(numbers) if word not in covered]


@cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def figures(quick: bool) -> dict[str, float | None]:
    rows = claims()
    texts = pages(rows)
    wrong = unsaid(rows, texts) + contradicted(rows)
    if not quick:
        wrong += failed_tests(rows) + failed_commands(rows)
    without = unsourced(rows, texts["README.md"])
    print("\n".join([*wrong, *without]))
    return {
        "claims": len(rows),
        "claims_false": len(wrong),
        "claims_quoted": sum("quotes" in row for row in rows),
        "claims_unsourced": len(without),
    }


if __name__ == "__main__":
    parts.run("claims", NAMES, figures, description=__doc__)
