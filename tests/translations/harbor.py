"""Task directories of Harbor 0.26: what their Dockerfile and COPY make, as docker does, and what their tests write."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import agentrl
from agentrl.testing.execution import play
from agentrl_formats import harbor
from agentrl_formats.harbor import Harbor
from tests.translations.rows import Row

FILES = {
    "task.toml": 'version = "1.0"\n[environment]\nmemory_mb = 128\n',
    "instruction.md": "Do it.\n",
    "environment/src/real.txt": "hi\n",
    "environment/src/.hidden": "",
    "environment/src/run": "echo ran\n",
    "environment/more/other.txt": "",
    "environment/b.txt": "b\n",
    "tests/test.sh": "#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n",
}
VERDICT = "echo $((1 - $?)) > /logs/verifier/reward.txt\n"
HEAD = "FROM ubuntu:24.04\nWORKDIR /app\n"


def translate(input: dict[str, Any]) -> tuple[Any, Any]:
    """Write a task directory and play it: the policy runs one command, and the tests give the reward."""
    with tempfile.TemporaryDirectory() as top:
        task = Path(top) / "task"
        for name, text in {**FILES, "environment/Dockerfile": HEAD, **input.get("files", {})}.items():
            (task / name).parent.mkdir(parents=True, exist_ok=True)
            (task / name).write_text(text)
        os.chmod(task / "environment/src/run", 0o755)
        for name in input.get("directories", []):
            (task / name).mkdir(parents=True)
        for name, target in input.get("links", {}).items():
            (task / name).symlink_to(target)
        for name in input.get("pipes", []):
            os.mkfifo(task / name)
        roots = {"ubuntu:24.04": "/"}
        [drawn] = Harbor.tasks("train", directory=top, roots=roots, held_out=0.0, rewards=input.get("rewards"))  # type: ignore[misc]
        call = {"name": "bash", "arguments": {"command": input.get("command", "true")}}
        played = play(Harbor, agentrl.Task(id="t", data=dict(drawn.data)), [call, "done"])
        lines = played.observations[1].split("\n")
        return [played.observations[0], *lines], played.reward


@contextlib.contextmanager
def planted() -> Iterator[None]:
    """Lose all links of a copied directory."""
    read = harbor.read_sources

    def without_links(files: Any) -> Any:
        return {path: body for path, body in read(files).items() if type(body) in (bytes, str)}

    with mock.patch.object(harbor, "read_sources", without_links):
        yield


def seen(name: str, command: str, sees: Sequence[str], grader: float = 1.0, *, copy: str = "", **input: Any) -> Row:
    if copy:
        input = {**input, "files": {"environment/Dockerfile": HEAD + copy + "\n", **input.get("files", {})}}
    return Row(name=name, input={"command": command, **input}, sees=["Do it.\n", *sees], grader=grader)


def refused(name: str, words: str, *, copy: str = "", **input: Any) -> Row:
    if copy:
        input = {**input, "files": {"environment/Dockerfile": HEAD + copy + "\n", **input.get("files", {})}}
    return Row(name=name, input=input, refused=words)


def verdict(name: str, script: str, grader: float = 1.0, *, words: str = "", **input: Any) -> Row:
    input = {"files": {"tests/test.sh": f"#!/bin/bash\ncd /logs/verifier\n{script}\n"}, **input}
    row = Row(name=name, input=input, refused=words) if words else seen(name, "echo ok", ["ok"], grader, **input)
    return replace(row, exhaustive=" beside " not in name)


PLAYED = [
    seen("a directory", "find . | sort", [".", "./.hidden", "./real.txt", "./run"], copy="COPY src ."),
    seen(
        "a link",
        "readlink link; cat link",
        ["real.txt", "hi"],
        copy="COPY src .",
        links={"environment/src/link": "real.txt"},
    ),
    seen(
        "a link to a directory",
        "cat d/a; readlink d",
        ["x", "sub"],
        copy="COPY src .",
        files={"environment/src/sub/a": "x\n"},
        links={"environment/src/d": "sub"},
    ),
    seen(
        "a link upwards, inside",
        "readlink sub/up; cat sub/up",
        ["../real.txt", "hi"],
        copy="COPY src .",
        files={"environment/src/sub/a": ""},
        links={"environment/src/sub/up": "../real.txt"},
    ),
    seen(
        "a link without a file",
        "readlink later",
        ["real.log"],
        copy="COPY src .",
        links={"environment/src/later": "real.log"},
    ),
    seen(
        "an empty directory",
        "ls -d out/in; touch out/in/x && echo written",
        ["out/in", "written"],
        copy="COPY src .",
        directories=["environment/src/out/in"],
    ),
    seen(
        "only an empty directory",
        "ls -d /app/new; ls /app/new",
        ["/app/new"],
        copy="COPY none new",
        directories=["environment/none"],
    ),
    seen("an executable without #!", "./run", ["ran"], copy="COPY src ."),
    seen(
        "a link as the source",
        "cat first; test -L first || echo copied",
        ["hi", "copied"],
        copy="COPY src/first .",
        links={"environment/src/first": "real.txt"},
    ),
    seen("a file to a directory", "ls /app", ["real.txt"], copy="COPY src/real.txt /app"),
    seen("a file to a directory with a slash", "ls /app/data", ["real.txt"], copy="COPY src/real.txt data/"),
    seen("a file to a name", "cat data", ["hi"], copy="COPY src/real.txt data"),
    seen("a file to a directory of COPY", "ls /app/d", ["b.txt", "other.txt"], copy="COPY more d\nCOPY b.txt d"),
    seen("a file to a directory of the image", "ls /opt", ["b.txt"], copy="COPY b.txt /opt"),
    seen("a file to a relative directory", "ls /app/x/y", ["b.txt"], copy="COPY b.txt ./x/../x/y/"),
    seen("a name that ends with a dot", "ls /app", ["b."], copy="COPY b.txt b."),
    seen(
        "two directories to one", "ls -A", [".hidden", "other.txt", "real.txt", "run"], copy="COPY src .\nCOPY more ."
    ),
    seen("a later file replaces", "cat real.txt", ["b"], copy="COPY src .\nCOPY b.txt real.txt"),
    seen("hidden files of a pattern", "ls -A d", [".hidden", "real.txt", "run"], copy="COPY src/* d/"),
    seen("several sources", "ls d", ["b.txt", "real.txt"], copy="COPY b.txt src/real.txt d/"),
    seen(
        "directories of WORKDIR",
        "pwd; ls -d /first /app/second",
        ["/app/second", "/app/second", "/first"],
        copy="WORKDIR /first\nWORKDIR /app\nWORKDIR second",
    ),
    seen(
        "instructions without an effect",
        "ls",
        ["b.txt"],
        copy='LABEL a="b" \\\n  c=$d\nMAINTAINER me\nEXPOSE 80/tcp\nCOPY b.txt .\nENTRYPOINT ["sh"]\nCMD ["-c", "$X"]',
    ),
    seen(
        "a link in tests",
        "ls",
        [""],
        files={
            "tests/data/expected": "e\n",
            "tests/test.sh": f"#!/bin/bash\ntest -f /tests/expected; {VERDICT}",
        },
        links={"tests/expected": "data/expected"},
    ),
    seen(
        "an empty directory in tests",
        "ls",
        [""],
        directories=["tests/out"],
        files={"tests/test.sh": f"#!/bin/bash\ntest -d /tests/out; {VERDICT}"},
    ),
    verdict("a number", "echo 0.5 > reward.txt", 0.5),
    verdict("a number in JSON", """echo '{"reward": 0.25}' > reward.json""", 0.25),
    verdict("both", """echo '{"reward": 0.25}' > reward.json; echo 1 > reward.txt""", 0.25),
    verdict("a report beside the number", """echo '{"passed": 3}' > reward.json; echo 1 > reward.txt"""),
    verdict("a list beside the number", "echo '[3]' > reward.json; echo 1 > reward.txt"),
    verdict("two rewards", """echo '{"a": 0.5, "b": 1}' > reward.json""", 1.5, rewards={"a": [0, 1], "b": [0, 1]}),
    verdict(
        "a report alone",
        """echo '{"passed": 3}' > reward.json""",
        words="they wrote passed, but the declared rewards are reward",
    ),
    verdict("a truth value", """echo '{"reward": true}' > reward.json""", words="reward = True"),
    verdict("no number", "echo ok > reward.txt", words="could not convert string to float"),
    verdict("nothing", "true", words="neither reward.json nor reward.txt"),
    verdict("NaN", "echo nan > reward.txt", words="reward = nan"),
]
ROWS = [
    *(replace(row, needs_sandbox=True) for row in PLAYED),
    refused(
        "a link out of the directory",
        "src/link: a link to ../b.txt, outside of",
        copy="COPY src .",
        links={"environment/src/link": "../b.txt"},
    ),
    refused(
        "an absolute link",
        "link: a link to /usr/bin/env, outside of",
        copy="COPY src .",
        links={"environment/src/link": "/usr/bin/env"},
    ),
    refused(
        "a link out of the tests", "tests/e: a link to ../solution/e, outside of", links={"tests/e": "../solution/e"}
    ),
    refused(
        "a pipe", "src/pipe: neither a file, a directory nor a link", copy="COPY src .", pipes=["environment/src/pipe"]
    ),
    refused("a pipe in tests", "tests/pipe: neither a file", pipes=["tests/pipe"]),
    refused(
        "several sources to a name",
        "Dockerfile, line 3: COPY: with several sources, the destination must end",
        copy="COPY b.txt src/run d",
    ),
    refused("no source", "Dockerfile, line 3: COPY: there is no gone", copy="COPY gone ."),
    refused("a source outside", "Dockerfile, line 3: COPY: ../tests is outside", copy="COPY ../tests ."),
    refused(
        "an ignore file",
        "Dockerfile, line 3: COPY: .dockerignore is not read",
        copy="COPY src .",
        files={"environment/.dockerignore": "*.log\n"},
    ),
    refused("an option", "Dockerfile, line 3: COPY: neither options", copy="COPY --chown=1 src ."),
    *(
        refused(
            f"instruction {line.split()[0]}",
            f"Dockerfile, line 3: {line.split()[0]} needs an image that was built",
            copy=line,
        )
        for line in (
            "RUN make",
            "ADD src .",
            "USER me",
            "ARG A=1",
            "VOLUME /x",
            'SHELL ["sh"]',
            "ONBUILD RUN x",
            "HEALTHCHECK NONE",
        )
    ),
    refused(
        "another user", "task.toml: agent.user: another user than root", files={"task.toml": '[agent]\nuser = "me"\n'}
    ),
    refused("another user for the tests", "task.toml: verifier.user", files={"task.toml": "[verifier]\nuser = 1000\n"}),
    refused("GPUs", "task.toml: environment.gpus: GPUs", files={"task.toml": "[environment]\ngpus = 1\n"}),
    refused("steps", "task.toml: steps: tasks of several steps", files={"task.toml": "[[steps]]\nname = 'a'\n"}),
    refused("services", "docker-compose.yaml: several services", files={"environment/docker-compose.yaml": ""}),
]
