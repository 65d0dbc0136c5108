"""Paths as people write them: `~`, slashes at the end, `file:` URLs, wherever a path is taken."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import agentrl
from agentrl.app.policies import weights_from_directory
from agentrl.app.received import selections
from agentrl.cli.main import main
from agentrl.config.load import load
from agentrl.core.errors import EnvironmentDefinitionError, InputError
from agentrl.core.files import expand_path
from agentrl.inspection.reader import RunReader
from agentrl.testing import play
from agentrl_formats.harbor import Harbor
from agentrl_formats.runners import Inspect
from agentrl_formats.servers import NemoGym
from tests.support.harbor_suite import ROOTS, write_suite

ENVIRONMENT = """
import agentrl

class Echo(agentrl.Environment):
    seats = ("solver",)

    async def run(self, ctx):
        turn = await ctx.agent("solver").act(agentrl.user("say it"))
        ctx.agent("solver").reward(0.5)

    @classmethod
    def tasks(cls, split, *, seed=0):
        return [agentrl.Task(id=str(number), data={}) for number in range(4)]
"""
FORMS: tuple[Callable[[Path], str], ...] = (
    lambda path: f"~/{path.relative_to(Path.home())}",
    lambda path: f"{path}/",
    lambda path: path.as_uri(),
    lambda path: f"file://localhost{path}",
)


def form_of_file(form: Callable[[Path], str], path: Path) -> str:
    """A file's path has no slash at its end."""
    return form(path).removesuffix("/")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory with a space in its path, and another working directory."""
    directory = tmp_path / "a home"
    directory.mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("HOME", str(directory))
    monkeypatch.chdir(tmp_path / "elsewhere")
    return directory


def test_a_path_is_what_people_mean(home: Path) -> None:
    for form in FORMS:
        assert expand_path(form(home / "x y")) == str(home / "x y")
    assert expand_path(Path("~/runs")) == str(home / "runs")
    assert expand_path(Path("file:///data/x")) == "/data/x"  # pathlib joins the slashes
    for same in (
        "",
        "runs",
        "/",
        "Qwen/Qwen3-0.6B@main",
        "package:directory",
        "$HOME/x",
        "x~",
        "https://example.com/v1/",
    ):
        assert expand_path(same) == same
    with pytest.raises(InputError, match="names the machine 'far'"):
        expand_path("file://far/data")


@pytest.mark.parametrize("form", FORMS)
def test_every_setting_that_holds_a_path_is_expanded(home: Path, form: Callable[[Path], str]) -> None:
    (home / "env.py").write_text(ENVIRONMENT)
    (home / "bots.py").write_text("def play(conversation, random):\n    return 'pass'\n")
    (home / "run.toml").write_text(
        f"""
        directory = "{form(home / "runs")}"
        environment.id = "{form_of_file(form, home / "env.py")}:Echo"
        model.path = "{form(home / "model")}"
        policies.solver.reference = "{form(home / "reference")}"
        policies.still = {{ kind = "frozen", path = "{form(home / "weights")}" }}
        policies.bot = {{ kind = "bot", id = "{form_of_file(form, home / "bots.py")}:play" }}
        """
    )
    config = load(form_of_file(form, home / "run.toml"))
    assert config.directory == str(home / "runs")
    assert config.environment.id == f"{home}/env.py:Echo"
    assert config.model.path == str(home / "model")
    dumped = config.model_dump()["policies"]
    assert dumped["solver"]["reference"] == str(home / "reference")
    assert (dumped["still"]["path"], dumped["bot"]["id"]) == (str(home / "weights"), f"{home}/bots.py:play")
    overridden = load(home / "run.toml", [f"model.path={form(home / 'other')}"])
    assert overridden.model.path == str(home / "other")
    made = agentrl.RunConfig(environment={"id": "x"}, model={"path": form(home / "m")})  # type: ignore[arg-type]
    assert made.model.path == str(home / "m")


@pytest.mark.parametrize(
    "form", [*FORMS[::2], *(pytest.param(form, marks=pytest.mark.exhaustive) for form in FORMS[1::2])]
)
def test_commands_and_functions_take_them(
    home: Path, sample_run: Path, capsys: pytest.CaptureFixture[str], form: Callable[[Path], str]
) -> None:
    run = home / "sample run"
    shutil.copytree(sample_run, run)
    file = home / "env.py"
    file.write_text(ENVIRONMENT)
    reference = f"{form_of_file(form, file)}:Echo"
    assert main(["run", "stats", form(run)]) == 0
    assert main(["run", "compare", form(run), form(run)]) == 0
    assert main(["run", "list", form(home)]) == 0
    assert "sample" in capsys.readouterr().out
    assert main(["run", "export", form(run), "--to", "jsonl", "--out", form(home / "out.jsonl"), "--limit", "2"]) == 0
    assert len((home / "out.jsonl").read_text().splitlines()) == 2
    assert main(["env", "check", reference]) == 0, capsys.readouterr().err
    assert play(reference, agentrl.Task(id="0", data={}), ["x"]).reward == 0.5
    assert agentrl.make(reference).__class__.__name__ == "Echo"
    reader = RunReader(form(run))
    assert reader.path == run
    reader.close()
    with pytest.raises(InputError, match=f"{run}/policies: contains no weights"):
        weights_from_directory("solver", form(run / "policies"))
    assert not any(Path().iterdir()), "nothing is made where the command ran"


@pytest.mark.parametrize("text", ["file://[x", "file:/data/a?b", "file:/data/a#b", "file://elsewhere/a", "a\0b"])
def test_what_is_no_path_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=re.escape(text.replace("\0", "\\x00"))):
        expand_path(text)


def test_a_recorded_path_is_judged_by_what_it_becomes() -> None:
    """Not by how it is written: a URL that looks like a path into the package, or a file that looks like a name."""
    installed = f"{Path(agentrl.__file__).parent}/environments"
    with pytest.raises(InputError, match="URL of a file"):
        list(selections({"model": {"path": f"file:/tmp/evil#/../..{installed}"}}))
    (model,) = selections({"model": {"path": f"file:{installed}/../../evil"}})
    (environment,) = selections({"environment": {"id": "evil/env.py/"}})
    assert not model.is_harmless
    assert not environment.is_harmless


@pytest.mark.parametrize("form", FORMS)
def test_options_of_task_formats_take_them(home: Path, form: Callable[[Path], str]) -> None:
    suite = write_suite(home / "tasks")
    tasks = Harbor.tasks("train", directory=form(suite), roots=ROOTS, held_out=0.0)
    assert {task.data["directory"] for task in tasks} == {str(suite)}
    rows = home / "rows.jsonl"
    rows.write_text('{"responses_create_params": {"input": "a"}}\n')
    (task,) = NemoGym.tasks("train", url="http://127.0.0.1:1", file=form_of_file(form, rows), held_out=0.0)
    assert task.data["file"] == str(rows)
    with pytest.raises(EnvironmentDefinitionError, match=re.escape(f"{home / 'no python'} cannot list the tasks")):
        Inspect.tasks("train", taskset="a", python=form_of_file(form, home / "no python"))
