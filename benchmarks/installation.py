"""Installing agentrl as a user does: `python -m benchmarks.installation [PART]`; all parts by default.

The wheel is built from the sdist of the working tree and goes into empty environments.

* `core`: the core alone, on each Python from 3.11 to 3.14 that is on PATH (`pythons`): the package imports, the command
  line answers, a new environment passes its check, and each package of packages/ installs from its wheel.
  `core_packages`: packages installed besides agentrl and pip; `wheel_mb`: size of the wheel.
* `oldest`: the same at the lowest versions pyproject.toml allows.
* `wheel-demo`: with what the demo needs, on each Python from 3.11 to 3.13 that is on PATH (`demo_pythons`); the demo
  runs from an empty directory. `installation_s`: creating an environment and installing the wheel; `demo_s`; both the
  longest. `reward_start`, the highest, and `reward_end`, the lowest.
* `commands`: `make setup`, then `make demo`, in clones of HEAD and of 1e57498d, which installed with pip, each with an
  empty HOME and so without a cache, in turn, twice. `setup_ratio`: the seconds of HEAD's `make setup` over the other's;
  `demo_ratio`: the same from the clone to the end of the demo; medians. `packages_changed`: packages that `make setup`
  installs in another version than pip with the same arguments.
* `docs`: `docs_words`, of all pages but the results; `pages_over_1000_words_on_the_newcomers_way`, of the
  README and the tutorials; `broken_links`, links to files and headings that do not exist.

Needs a package index, 2 GB of disk and some minutes; `make test` leaves it out.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import Report
from tests.markdown_pages import PAGES, broken_links

ROOT = Path(__file__).parents[1]
NEWCOMERS_WAY = (
    "README.md",
    "docs/index.md",
    "docs/tutorials/getting_started.md",
    "docs/tutorials/gpu.md",
    "docs/tutorials/outside_agents.md",
    "docs/tutorials/coevolution.md",
    "docs/how-to/faq.md",
)
"""The pages that a newcomer reads first."""
RUN_EXTRAS = "train,calculator"
"""What `make setup` installs."""
INSTALLED_WITH_PIP = "1e57498d"
PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet")


def run(*command: str | Path, cwd: Path) -> str:
    """The output of a command that must succeed."""
    print("$", *command, flush=True)
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def fresh_environment(directory: Path, python: str = sys.executable) -> Path:
    """The interpreter of a new, empty virtual environment."""
    run(python, "-m", "venv", directory, cwd=ROOT)
    return directory / "bin" / "python"


def built(work: Path) -> Path:
    """The wheel, built from the sdist of the working tree."""
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", work, cwd=ROOT)
    [sdist] = work.glob("*.tar.gz")
    run(sys.executable, *PIP, "wheel", "--no-deps", "--wheel-dir", work, sdist, cwd=work)
    [wheel] = work.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for needed in (
        "agentrl/py.typed",
        "agentrl/examples/01_tool_use.toml",
        *(f"agentrl/environments/{name}/model/model.safetensors" for name in ("calculator", "frozen_lake")),
        "agentrl/environments/calculator/model/chat_template.jinja",
    ):
        if needed not in names:
            raise SystemExit(f"{wheel.name} lacks {needed}")
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, {len(names)} files")
    return wheel


def packages(work: Path) -> list[Path]:
    """The wheels of packages/, each with the code and entry points of its working tree."""
    wheels = []
    for project in sorted(ROOT.glob("packages/*/pyproject.toml")):
        built_to = work / project.parent.name
        run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", built_to, cwd=project.parent)
        wheels += built_to.glob("*.whl")
    return wheels


def core(work: Path) -> dict[str, float | None]:
    """The core at the newest versions, on each Python."""
    wheel, further, pythons = built(work), packages(work), _pythons(11, 12, 13, 14)
    counts = [
        _core(work / f"environment-{number}", python, wheel, further=further) for number, python in enumerate(pythons)
    ]
    return {"pythons": len(pythons), "core_packages": max(counts), "wheel_mb": wheel.stat().st_size / 1e6}


def oldest(work: Path) -> dict[str, float | None]:
    """The core at its lower bounds."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = [re.sub(">=", "==", text, count=1) for text in project["dependencies"]]
    return {"oldest_packages": _core(work / "environment", sys.executable, built(work), pins)}


def _pythons(*minors: int) -> list[str]:
    """The interpreters of Python 3.x on PATH."""
    return [found for minor in minors if (found := _python(f"python3.{minor}"))]


def _python(name: str) -> str | None:
    """The path of an interpreter; None if it is not on PATH or does not start."""
    found = shutil.which(name)
    if found is None or subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode:
        return None
    return found


def _core(
    directory: Path, interpreter: str, wheel: Path, pins: Sequence[str] = (), *, further: Sequence[Path] = ()
) -> int:
    """Try the core in an empty environment, then with further wheels; returns the number of packages of the core."""
    python = fresh_environment(directory, interpreter)
    run(python, *PIP, "install", wheel, *pins, cwd=directory)
    listed = json.loads(run(python, "-m", "pip", "list", "--format=json", cwd=directory))
    packages = [package for package in listed if package["name"] not in {"episodic-rl", "pip", "setuptools"}]
    print(f"{len(packages)} packages: " + ", ".join(f"{p['name']} {p['version']}" for p in packages))
    agentrl = python.parent / "agentrl"
    names = "import agentrl; [getattr(agentrl, name) for name in agentrl.__all__ if name != 'LossBatch']"  # needs torch
    run(python, "-W", "error", "-c", names, cwd=directory)
    for arguments in (["--help"], ["episode", "list", "--help"], ["env", "list"], ["env", "new", "word_sums"]):
        run(agentrl, *arguments, cwd=directory)
    print(run(agentrl, "env", "check", "word_sums/env.py", cwd=directory).strip())
    run(agentrl, "train", "word_sums/train.toml", "--dry-run", cwd=directory)
    if further:
        run(python, *PIP, "install", "--no-deps", *further, cwd=directory)
        environments = json.loads(run(agentrl, "env", "list", "--json", cwd=directory))
        formats = [line for line in environments if line["entry_point"].startswith("agentrl_formats.")]
        if not formats or any(line["error"] for line in formats):
            raise SystemExit(f"the wheel of the formats: {formats or 'registers no environment'}")
    return len(packages)


def wheel_demo(work: Path) -> dict[str, float | None]:
    """The demo from the installed wheel, on each Python."""
    wheel, demos = built(work), list[dict[str, float]]()
    for number, interpreter in enumerate(_pythons(11, 12, 13)):
        directory = work / f"demo-{number}"
        directory.mkdir()
        started = time.perf_counter()
        python = fresh_environment(directory / "environment", interpreter)
        run(python, *PIP, "install", "-c", ROOT / "constraints.txt", f"{wheel}[{RUN_EXTRAS}]", cwd=directory)
        installed = time.perf_counter()
        agentrl = python.parent / "agentrl"
        run(agentrl, "demo", cwd=directory)
        seconds = {"installation_s": installed - started, "demo_s": time.perf_counter() - installed}
        summary = json.loads((directory / "runs" / "demo" / "summary.json").read_text(encoding="utf-8"))
        demos.append({**seconds, "reward_start": summary["reward_start"], "reward_end": summary["reward_end"]})
        print(run(python, "--version", cwd=directory).strip(), demos[-1], run(agentrl, "doctor", cwd=directory))
        shutil.rmtree(directory)
    lowest = min(demo["reward_end"] for demo in demos)
    highest = {name: max(demo[name] for demo in demos) for name in demos[0] if name != "reward_end"}
    return {"demo_pythons": len(demos), **highest, "reward_end": lowest}


def commands(work: Path) -> dict[str, float | None]:
    """The README's first command, and its installation alone, beside an older commit."""
    commits = {"HEAD": "HEAD", "before": INSTALLED_WITH_PIP}
    seconds: dict[str, dict[str, list[float]]] = {name: {"setup": [], "demo": []} for name in commits}
    for repeat in range(2):
        for name, commit in commits.items():
            clone = work / f"{name}-{repeat}"
            started = time.perf_counter()
            run("git", "clone", "--quiet", ROOT, clone, cwd=work)
            run("git", "checkout", "--quiet", commit, cwd=clone)
            for target in ("setup", "demo"):
                _make(target, clone)
                seconds[name][target].append(time.perf_counter() - started)
    python, pins = fresh_environment(work / "pip"), work / "HEAD-0" / "constraints.txt"
    run(python, *PIP, "install", "-c", pins, "-e", f"{work / 'HEAD-0'}[{RUN_EXTRAS}]", cwd=work)
    expected = _frozen(python)
    actual = _frozen(work / "HEAD-0" / ".venv" / "bin" / "python") - {f"uv=={_pin(pins, 'uv')}"}
    print(seconds, *sorted(expected ^ actual), sep="\n")

    def ratio(target: str) -> float:
        return statistics.median(seconds["HEAD"][target]) / statistics.median(seconds["before"][target])

    return {
        "setup_ratio": ratio("setup"),
        "demo_ratio": ratio("demo"),
        "packages_changed": len(expected ^ actual),
    }


def _make(target: str, clone: Path) -> None:
    """Run a command of the Makefile as on a new account: only PATH and the settings of pip and of certificates."""
    home = clone.with_name(f"{clone.name}-home")
    home.mkdir(exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if name == "PATH" or name.startswith(("PIP_", "SSL_"))}
    done = subprocess.run(
        ["make", target], cwd=clone, env=kept | {"HOME": str(home)}, capture_output=True, text=True, check=False
    )
    print(f"make {target} in {clone.name}: exit code {done.returncode}", flush=True)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)


def _frozen(python: Path) -> set[str]:
    return set(run(python, "-m", "pip", "freeze", "--exclude-editable", cwd=python.parent).split("\n"))


def _pin(constraints: Path, name: str) -> str:
    [version] = re.findall(rf"^{name}==(.*)$", constraints.read_text(encoding="utf-8"), re.MULTILINE)
    return version


def documentation(work: Path) -> dict[str, float | None]:
    """The pages: their words, and their links."""
    del work
    pages = [page for page in PAGES if page.parent.name != "results"]
    words = {str(page.relative_to(ROOT)): len(page.read_text(encoding="utf-8").split()) for page in pages}
    broken = [f"{page.relative_to(ROOT)}: {target}" for page in PAGES for target in broken_links(page)]
    long = [name for name in NEWCOMERS_WAY if words[name] > 1000]
    print("\n".join([*broken, *(f"{name}: {words[name]} words" for name in long)]))
    return {
        "docs_words": sum(words.values()),
        "pages_over_1000_words_on_the_newcomers_way": len(long),
        "broken_links": len(broken),
    }


PARTS = {
    "core": core,
    "oldest": oldest,
    "wheel-demo": wheel_demo,
    "commands": commands,
    "docs": documentation,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=PARTS)
    part = parser.parse_args().part
    report = Report("installation", quick=False, repeats=1, compared_with="nothing")
    for name in PARTS if part is None else [part]:
        with tempfile.TemporaryDirectory(prefix="agentrl-installation-") as work:
            report.figures.update(PARTS[name](Path(work)))
    report.print()


if __name__ == "__main__":
    main()
