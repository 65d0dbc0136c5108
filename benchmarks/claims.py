"""Whether what README and docs/ say is true: `python -m benchmarks.claims`.

`claims.toml` has a row per claim: a `file`, what it `says` word for word, and what it rests on:

* `tests`: tests that fail if it is false; they exist, and other commands run them;
* `value` and `is`: a constant of the code, or the length of a collection;
* `generated`: the function of docs/generators/peers.py that writes the sentence from docs/peers.json;
* `source` and `has`: a file of this repository and what stands in it;
* `command` and `record`: what measures it, and what it last gave, where and when;
* `read`: where it stands in another project, with `on`, the date it was read.

`claims`: rows. `claims_false`: rows whose sentence is not in its file, or which do not hold. `claims_unproved`: rows
that rest on a record that no command of this repository repeats. `claims_unsourced`: rows that rest on nothing, and
numbers in README's text that no row covers.
"""

from __future__ import annotations

import importlib
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks import parts
from docs.generators import peers

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("claims", "claims_false", "claims_unproved", "claims_unsourced")
GROUNDS = ("tests", "value", "generated", "source", "record", "read")

Claim = Mapping[str, Any]


def claims() -> list[Claim]:
    """The rows of claims.toml, with the sentences that are generated."""
    rows: list[Claim] = tomllib.loads((ROOT / "benchmarks" / "claims.toml").read_text(encoding="utf-8"))["claim"]
    line = json.loads(_text(ROOT / "docs" / "peers.json"))
    return [{**row, "says": getattr(peers, row["generated"])(line)} if "generated" in row else row for row in rows]


def pages(rows: Sequence[Claim]) -> dict[str, str]:
    """The texts of the files that the rows name."""
    return {name: (ROOT / name).read_text(encoding="utf-8") for name in sorted({row["file"] for row in rows})}


def false_claims(rows: Sequence[Claim], texts: Mapping[str, str]) -> list[str]:
    """The claims that are not in their page or do not hold, each with the reason."""
    words = {name: " ".join(text.split()) for name, text in texts.items()}
    found = []
    for row in rows:
        if " ".join(row["says"].split()) not in words[row["file"]]:
            found.append(f"{row['file']} does not say: {row['says']}")
        elif reason := objection(row):
            found.append(f"{row['file']}: {row['says']}: {reason}")
    return found


def objection(row: Claim) -> str:
    """Why a claim does not hold; empty if it does, or if it rests on what was read or measured elsewhere."""
    for test in row.get("tests", ()):
        path, _, name = test.partition("::")
        file = ROOT / path
        if not file.exists() or (
            name and not re.search(rf"^(async )?(def|class) {name}\b|^{name} = ", _text(file), re.M)
        ):
            return f"there is no test {test}"
    if "value" in row:
        module, _, name = row["value"].partition(":")
        value = getattr(importlib.import_module(module), name)
        value = len(value) if hasattr(value, "__len__") and not isinstance(value, str) else value
        if value != row["is"]:
            return f"{row['value']} is {value}, not {row['is']}"
    if "source" in row and row["has"] not in _text(ROOT / row["source"]):
        return f"{row['source']} lacks {row['has']}"
    return ""


def unsourced(rows: Sequence[Claim], readme: str) -> list[str]:
    """Claims that rest on nothing, and the sentences of README with a number that no claim covers."""
    found = [f"{row['file']}: {row['says']}" for row in rows if not any(row.get(ground) for ground in GROUNDS)]
    found += [f"{row['says']}: read when?" for row in rows if "read" in row and not row.get("on")]
    prose = " ".join(re.sub(r"^```.*?^```$|\]\([^)]*\)|`[^`]*`", " ", readme, flags=re.DOTALL | re.MULTILINE).split())
    covered = " ".join(row["says"] for row in rows if row["file"] == "README.md")
    covered = " ".join(re.sub(r"\]\([^)]*\)|`[^`]*`", " ", covered).split())
    numbers = {match[0] for match in re.finditer(r"[^ ]*\d[^ ]*", prose)}
    return found + [f"README.md: nothing covers {word}" for word in sorted(numbers) if word not in covered]


def unproved(rows: Sequence[Claim]) -> list[str]:
    """The claims that rest on a record alone, and name no command of this repository that repeats it."""
    return [row["says"] for row in rows if "record" in row and not is_command(row.get("command", ""))]


def is_command(command: str) -> bool:
    """Whether a command is one of this repository: a target of the Makefile, a benchmark, or one of `agentrl`."""
    match command.split():
        case ["make", target]:
            return re.search(rf"^{re.escape(target)}:", _text(ROOT / "Makefile"), re.MULTILINE) is not None
        case ["python", "-m", module, *_]:
            return (ROOT / f"{module.replace('.', '/')}.py").exists()
        case ["agentrl", *_]:
            return True
    return False


@cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def figures(quick: bool) -> dict[str, float | None]:
    del quick
    rows = claims()
    texts = pages(rows)
    wrong, without = false_claims(rows, texts), unsourced(rows, texts["README.md"])
    alone = unproved(rows)
    print("\n".join([*wrong, *without, *alone]))
    return {
        "claims": len(rows),
        "claims_false": len(wrong),
        "claims_unproved": len(alone),
        "claims_unsourced": len(without),
    }


if __name__ == "__main__":
    parts.run("claims", NAMES, figures, description=__doc__)
