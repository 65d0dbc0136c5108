"""Builds each contestant's environment from the package index, pinned, outside the repository."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from benchmarks.peers.contenders import BROKEN, Contender

ROOT = Path(__file__).resolve().parents[2]
PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet")


@dataclass(frozen=True, kw_only=True)
class Built:
    """An environment that is ready."""

    python: Path
    packages: int
    """Installed distributions, pip and setuptools left out."""
    megabytes: float


def wheel(cache: Path) -> Path:
    """Build the wheel of the working tree."""
    directory = cache / "wheel"
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.glob("*.whl"):
        old.unlink()
    _run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory), cwd=ROOT)
    return next(directory.glob("*.whl"))


def build(contender: Contender, cache: Path, built_wheel: Path) -> Built:
    """Install what the contestant needs, unless a previous call did.

    The pins of constraints.txt apply where they can: to all but verifiers, whose own pins contradict them.
    """
    directory = cache / contender.environment
    python = directory / "bin" / "python"
    pins = _pins(cache)
    is_pinned = contender.environment != "verifiers"
    wanted = hashlib.sha256(json.dumps([contender.requirements, is_pinned and pins.read_text()]).encode()).hexdigest()
    stamp = directory / "built"
    requirements = [f"{built_wheel}{text[1:]}" if text.startswith(".") else text for text in contender.requirements]
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"installing {', '.join(contender.requirements)} into {directory}", flush=True)
        _run(sys.executable, "-m", "venv", "--clear", str(directory), cwd=cache)
        constraints = ["-c", str(pins)] if is_pinned else []
        _run(str(python), *PIP, "install", *constraints, *requirements, cwd=cache)
        _run(str(python), *PIP, "uninstall", "--yes", *BROKEN, cwd=cache)
        stamp.write_text(wanted)
    elif any(text.startswith(".") for text in contender.requirements):
        _run(str(python), *PIP, "install", "--no-deps", "--force-reinstall", str(built_wheel), cwd=cache)
    names = json.loads(_run(str(python), "-m", "pip", "list", "--format=json", cwd=cache))
    size = int(_run("du", "-sk", str(directory), cwd=cache).split()[0])
    count = sum(1 for package in names if package["name"] not in {"pip", "setuptools"})
    return Built(python=python, packages=count, megabytes=size / 1024)


def float32_model(model: Path, cache: Path) -> Path:
    """A copy of a checkpoint in float32, so that no contestant computes in bfloat16."""
    if not model.is_dir():
        raise SystemExit(f"{model} is missing; make it with `make smollm2`")
    path = cache / f"{model.name}-float32"
    if not path.exists():
        shutil.copytree(model, path.with_suffix(".new"), dirs_exist_ok=True)
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).save_pretrained(path.with_suffix(".new"))
        path.with_suffix(".new").rename(path)
    return path


def _pins(cache: Path) -> Path:
    """The repository's pins without its own distribution."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    path = cache / "pins.txt"
    path.write_text("".join(f"{line}\n" for line in lines if "==" in line and not line.startswith("#")))
    return path


def _run(*command: str, cwd: Path) -> str:
    finished = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {finished.returncode}\n{finished.stdout}{finished.stderr}")
    return finished.stdout
