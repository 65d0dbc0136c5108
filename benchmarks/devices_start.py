"""The part `start` of `benchmarks.devices`: trainer and vLLM start side by side, and a second start finds caches."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.first_hour_start import ENVIRONMENT, RUN, SMOLLM2

_READY = re.compile(r"the (?:trainer|engine) is ready: ([\d.]+) s")


def figures(quick: bool) -> dict[str, float | None]:
    """Measure two starts of SmolLM2-135M; `quick`: of the bundled model."""
    model = "agentrl.environments:calculator/model" if quick else str(SMOLLM2)
    if not quick and not SMOLLM2.is_dir():
        raise SystemExit(f"{SMOLLM2} is missing: make smollm2")
    with tempfile.TemporaryDirectory() as place:
        caches = Path(place) / "caches"
        starts = [_start(Path(place) / f"start{number}", model, caches) for number in range(2)]
    (first, first_overlap), (second, second_overlap) = starts
    return {
        "start_overlap": max(first_overlap, second_overlap),
        "first_start_s": first,
        "second_start_s": second,
        "second_start_ratio": second / first,
    }


def _start(directory: Path, model: str, caches: Path) -> tuple[float, float]:
    """Start a run with vLLM; return the seconds to the first turn, and the ratio of the time from the beginning of
    loading to the first turn over that until both trainer and engine were ready."""
    directory.mkdir()
    (directory / "env.py").write_text(ENVIRONMENT)
    (directory / "run.toml").write_text(RUN.replace("MODEL", json.dumps(model)) + "[engine.vllm]\n")
    places = ("XDG_CACHE_HOME", "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    variables = {name: str(caches / name.lower()) for name in places}
    command = [sys.executable, "-u", "-m", "agentrl.cli", "train", "run.toml"]
    began = time.perf_counter()
    log = directory / "output.log"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command, cwd=directory, env=os.environ | variables, stdout=output, stderr=output, start_new_session=True
        ) as process,
    ):
        loading = 0.0
        while not (directory / "sampled").exists():
            if process.poll() is not None:
                raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}\n{log.read_text()}")
            if not loading and "loading trainer and engine" in log.read_text():
                loading = time.perf_counter()
            time.sleep(0.02)
        ended = time.perf_counter()
        os.killpg(process.pid, signal.SIGKILL)
    ready = max(float(seconds) for seconds in _READY.findall(log.read_text()))
    print(f"  {ended - began:.1f} s to the first turn, {ready:.1f} s to the slower of trainer and engine", flush=True)
    return ended - began, (ended - loading) / ready
