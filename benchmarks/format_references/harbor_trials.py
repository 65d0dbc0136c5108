"""Harbor's own trials: its oracle runs each task's solution, its verifier the tests. Prints the rewards by task.

    harbor_trials.py DIRECTORY_OF_TASKS

Harbor has no provider that needs neither Docker nor an account, so this one runs commands with bubblewrap.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig, TrialConfig
from harbor.trial.trial import Trial

SCRATCH = Path(tempfile.mkdtemp(prefix="harbor-"))


class Bubblewrap(BaseEnvironment):
    """A directory for /, with this machine's /usr."""

    @staticmethod
    def type() -> str:
        return "bubblewrap"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self) -> None:
        pass

    async def start(self, force_build: bool) -> None:
        self.top, self.workdir, self.variables = SCRATCH / self.session_id, Path("/"), {}
        for name in ("usr", "tmp", "etc", "root", "logs/verifier", "logs/agent", "logs/artifacts", "tests", "solution"):
            (self.top / name).mkdir(parents=True, exist_ok=True)
        for name in ("bin", "lib", "lib64", "sbin"):
            (self.top / name).symlink_to(f"usr/{name}")
        text = (self.environment_dir / "Dockerfile").read_text().replace("\\\n", " ")
        for line in text.splitlines():
            word, _, rest = line.strip().partition(" ")
            if word == "WORKDIR":
                self.workdir /= rest
                self._host(self.workdir).mkdir(parents=True, exist_ok=True)
            elif word == "ENV":
                self.variables |= dict(pair.split("=", 1) for pair in rest.split())
            elif word == "COPY":
                source, target = rest.split()
                await self.upload_dir(self.environment_dir / source, self.workdir / target)

    async def stop(self, delete: bool) -> None:
        shutil.rmtree(self.top, ignore_errors=True)

    def _host(self, path: object) -> Path:
        return self.top / str(path).strip("/")

    async def upload_file(self, source_path: object, target_path: object) -> None:
        self._host(target_path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source_path, self._host(target_path))

    async def upload_dir(self, source_dir: object, target_dir: object) -> None:
        shutil.copytree(source_dir, self._host(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path: object, target_path: object) -> None:
        shutil.copy(self._host(source_path), target_path)

    async def download_dir(self, source_dir: object, target_dir: object) -> None:
        shutil.copytree(self._host(source_dir), target_dir, dirs_exist_ok=True)

    async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None, **more) -> ExecResult:
        variables = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/root", **self.variables, **(env or {})}
        settings = [word for name, value in variables.items() for word in ("--setenv", name, value)]
        process = await asyncio.create_subprocess_exec(
            *("bwrap", "--unshare-all", "--die-with-parent", "--uid", "0", "--gid", "0", "--clearenv"),
            *("--bind", str(self.top), "/", "--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev", *settings),
            *("--chdir", str(cwd or self.workdir), "/bin/bash", "-c", command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(process.communicate(), timeout_sec)
        return ExecResult(stdout=out.decode(), stderr=err.decode(), return_code=process.returncode)


async def main(top: Path) -> None:
    rewards = {}
    for directory in sorted(top.iterdir()):  # noqa: ASYNC240
        config = TrialConfig(
            task=TaskConfig(path=directory),
            trials_dir=SCRATCH / "trials",
            agent=AgentConfig(name="oracle"),
            environment=EnvironmentConfig(import_path="harbor_trials:Bubblewrap"),
        )
        result = await (await Trial.create(config)).run()
        error = result.exception_info and result.exception_info.exception_message
        rewards[directory.name] = error or result.verifier_result.rewards
    print(json.dumps(rewards))


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(__file__))
    asyncio.run(main(Path(sys.argv[1])))
    shutil.rmtree(SCRATCH)
