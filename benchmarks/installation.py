"""Installing agentrl as a user does: `python -m benchmarks.installation oldest` or `… wheel-demo`.

`oldest`: the core at the lowest versions pyproject.toml allows, in an empty environment: the package imports, the
command line answers, a new environment passes its check. `core_packages`: what was installed besides agentrl and pip.
`wheel-demo`: wheel and sdist are built; the wheel, with what the demo needs, goes into an empty environment; the demo
runs from an empty directory. `installation_s`, `demo_s`, `reward_start`, `reward_end` tell how that went.
Needs a package index, 2 GB of disk and some minutes; `make test` leaves both out.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
import zipfile
from pathlib import Path

from benchmarks.report import Report

ROOT = Path(__file__).parents[1]
PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet")


def run(*command: str | Path, cwd: Path) -> str:
    """The output of a command that must succeed."""
    print("$", *command, flush=True)
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def fresh_environment(directory: Path) -> Path:
    """The interpreter of a new, empty virtual environment."""
    venv.create(directory, with_pip=True)
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


def oldest(work: Path) -> dict[str, float | None]:
    """The core at its lower bounds."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = [re.sub(">=", "==", text, count=1) for text in project["dependencies"]]
    wheel = built(work)
    python = fresh_environment(work / "environment")
    run(python, *PIP, "install", wheel, *pins, cwd=work)
    listed = json.loads(run(python, "-m", "pip", "list", "--format=json", cwd=work))
    packages = [package for package in listed if package["name"] not in {"agentrl", "pip", "setuptools"}]
    print(f"{len(packages)} packages: " + ", ".join(f"{p['name']} {p['version']}" for p in packages))
    agentrl = python.parent / "agentrl"
    run(python, "-W", "error", "-c", "import agentrl; [getattr(agentrl, n) for n in agentrl.__all__]", cwd=work)
    for arguments in (["--help"], ["episode", "list", "--help"], ["env", "list"], ["env", "new", "word_sums"]):
        run(agentrl, *arguments, cwd=work)
    print(run(agentrl, "env", "check", "word_sums/env.py", cwd=work).strip())
    run(agentrl, "train", "word_sums/train.toml", "--dry-run", cwd=work)
    return {"core_packages": len(packages)}


def wheel_demo(work: Path) -> dict[str, float | None]:
    """The demo from the installed wheel."""
    started = time.perf_counter()
    wheel = built(work)
    python = fresh_environment(work / "environment")
    extras = f"{wheel}[train,ray,calculator]"
    run(python, *PIP, "install", "-c", ROOT / "constraints.txt", extras, cwd=work)
    installed = time.perf_counter()
    agentrl = python.parent / "agentrl"
    (work / "empty").mkdir()
    print(run(agentrl, "doctor", cwd=work / "empty"))
    run(agentrl, "demo", cwd=work / "empty")
    ended = time.perf_counter()
    summary = json.loads((work / "empty" / "runs" / "demo" / "summary.json").read_text(encoding="utf-8"))
    rewards = {name: summary[name] for name in ("reward_start", "reward_end")}
    return {"installation_s": installed - started, "demo_s": ended - installed, **rewards}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("oldest", "wheel-demo"))
    what = parser.parse_args().what
    report = Report(f"installation {what}", quick=False, repeats=1, compared_with="nothing")
    with tempfile.TemporaryDirectory(prefix="agentrl-installation-") as work:
        report.figures.update(oldest(Path(work)) if what == "oldest" else wheel_demo(Path(work)))
    report.print()


if __name__ == "__main__":
    main()
