"""Mistakes of a tired user: each answer names the place (a file, key or option), the cause and the remedy."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from agentrl import check_environment
from agentrl.cli.main import main
from agentrl.environment.games import PettingZooEnvironment, TextArenaEnvironment
from agentrl.environment.gym import GymEnvironment
from agentrl.environment.harness import HarnessEnvironment
from agentrl.environment.overrides import declared_attributes, evaluated, fits
from agentrl.environment.tools import ToolEnvironment
from tests.support.sample_run import write_sample_run

ENVIRONMENT = """
import agentrl

class Sum(agentrl.ToolEnvironment):
    @agentrl.tool
    def add(self, a: int, b: int) -> str:
        "Add."
        return str(a + b)

    def reward(self, task, episode):
        return 1.0

    @classmethod
    def tasks(cls, split, *, seed=0, count=4):
        return [] if seed == 1 else [agentrl.Task(id=f"{split}{n}", data={"question": "1 + 1?"}) for n in range(count)]
"""
HARNESS = """
import agentrl

class Agent(agentrl.HarnessEnvironment):
    seats = ("main",)
    command = ["true"]
    task_file = "tasks.jsonl"

    def reward(self, task, episode):
        return 1.0
"""
RUN = """
name = "x"
directory = "runs"
environment.id = "env.py:Sum"
model.path = "models/small"
[policies.solver]
"""
JUDGE = """
[policies.judge]
kind = "remote"
url = "{url}"
model = "m"
[seats]
agent = ["solver", "judge"]
"""


class Answer(NamedTuple):
    """What an answer contains."""

    place: str
    cause: str
    remedy: str


COMMANDS = {
    # a configuration
    "train rum.toml": Answer("rum.toml", "no such file in", "did you mean run.toml"),
    "train models": Answer("models", "is a directory", "give a TOML file"),
    "train env.py:Sum": Answer("env.py:Sum", "no such file", "--environment.id=env.py:Sum"),
    "train env.py": Answer("env.py", "not TOML", "a TOML file is wanted here"),
    "train broken.toml": Answer("broken.toml:1:", "not TOML", "Invalid value"),
    "train typo.toml": Answer("typo.toml", "unknown key", "did you mean policies.solver.step_size"),
    "train quoted.toml": Answer("quoted.toml", 'step_size = "8"', "without quotes: 8"),
    "train judged.toml": Answer("policies.judge.url", "nothing answers there", "start the server"),
    "train keyed.toml": Answer("policies.judge.api_key_env", "no variable NO_SUCH_KEY", "set it"),
    "train run.toml --polices.solver.step_size=4": Answer("command line", "unknown key", "did you mean policies"),
    "train run.toml --policies.solver.step_size=abc": Answer("command line", '"abc"', "a whole number"),
    "train run.toml --credit.group_size=1": Answer("command line", "group_size = 1", "group_size = 2 or more"),
    "train run.toml --policies.other.step_size=4": Answer("policies.other", "no policy 'other'", "policies: solver"),
    "train run.toml --policies.solver.kind=trainde": Answer("policies.solver", "trainde", "one of 'trained'"),
    "train run.toml --steps": Answer("--steps", "needs a value", "--steps=VALUE"),
    "train run.toml 12": Answer("'12'", "unknown argument", "--section.field=value"),
    "train run.toml --name=taken": Answer("runs/taken", "exists", "--resume"),
    "train run.toml --name=demmo --resume": Answer("runs", "nothing to resume", "did you mean runs/demo"),
    'train run.toml --sinks=["wandb"]': Answer("wandb", "not installed", "pip install"),
    # files and models
    "train run.toml --environment.id=envv.py:Sum": Answer("environment.id", "no file envv.py in", "mean env.py:Sum"),
    "train run.toml --environment.id=env.py:Sun": Answer("env.py", "has no 'Sun'", "it defines: Sum"),
    "train run.toml --environment.id=envv:Sum": Answer("{here}", "the module 'envv'", "did you mean env?"),
    "evaluate run.toml --environment.id=env.py:Sume": Answer("env.py", "has no 'Sume'", "mean {here}/env.py:Sum?"),
    "train run.toml --environment.id=env": Answer("'env'", "no environment is called", "give that path"),
    "train run.toml --environment.id=fails.py:Sum": Answer("fails.py:1", "ZeroDivisionError", "cannot import"),
    "train run.toml --environment.options.cuont=3": Answer("environment.options", "(cuont)", "did you mean count?"),
    "train run.toml --seed=1": Answer("Sum.tasks", "is empty", "seed=1"),
    "train run.toml --model.path=./nope": Answer("model.path", "no such directory", "hf download"),
    "train run.toml --model.path=models/smal": Answer("model.path", "no such directory", "mean {here}/models/small?"),
    "train run.toml --model.path=org/nope": Answer(
        "model.path", "no directory {here}/org/nope", "hf download org/nope"
    ),
    "train run.toml --model models": Answer("{here}/models", "config.json is missing", "hf download"),
    "train run.toml --model http://127.0.0.1:9/v1": Answer("--model", "cannot be trained", "the directory of a model"),
    "evaluate run.toml --model http://127.0.0.1:9/v1": Answer("http://127.0.0.1:9/v1", "unreachable", "refused"),
    "evaluate run.toml --policy nope": Answer("nope", "no", "policies"),
    # recorded runs
    "episode list demmo": Answer("{here}/runs", "no run demmo", "did you mean demo"),
    "run view ./runs/demmo": Answer("{here}/runs", "no run demmo", "did you mean runs/demo"),
    "run view runs": Answer("{here}/runs", "not a run", "name one: demo"),
    "run stats models": Answer("{here}/models", "contains no run", "journal/control.db"),
    "run list nowhere": Answer("{here}/nowhere", "no such directory", "agentrl train"),
    "run compare demo demmo": Answer("{here}/runs", "no run demmo", "did you mean demo"),
    "run serve demmo": Answer("{here}/runs", "no run demmo", "did you mean demo"),
    "episode show demo e99999": Answer("demo", "no episode 'e99999'", "agentrl episode list"),
    "episode list demo --where rewrd=0": Answer("--where", "'rewrd' is not a column", "did you mean reward"),
    "episode list demo --where reward": Answer("--where", "after reward", "expected one of ="),
    "episode list demo --where reward=good": Answer("--where", "'good'", "must be compared with a number"),
    "episode list demo --sort rewrd": Answer("--sort", "'rewrd' is not a column", "did you mean reward"),
    "episode list demo --columns rewrd": Answer("--columns", "'rewrd' is not a column", "did you mean reward"),
    "run curve demo --metric norm": Answer("norm", "no metric", "did you mean grad_norm"),
    "step list demo --policy bogus": Answer("demo", "policy 'bogus'", "there are: proposer, solver"),
    "step replay demo 99999": Answer("demo", "99999", "agentrl step list"),
    "run export demo --to html --out demo.html": Answer("demo.html", "exists", "--force"),
    # environments
    "env new Bad-Name": Answer("'Bad-Name'", "name", "letters"),
    "env new my_desk": Answer("{here}/my_desk", "exists", "choose another name"),
    "env check": Answer("nothing to check", "nothing to check", "give an environment"),
    "demo": Answer("runs/demo", "exists", "resume it with --resume"),
    "demo --resume --name=demmo": Answer("runs", "nothing to resume", "did you mean runs/demo"),
    "demo nope": Answer("nope", "no example", "01_tool_use"),
}
"""Commands with a mistake, and their answers."""

CLASSES = {
    ("Sum", "seats = 'solver'"): Answer("seats", "got 'solver'", "('solver',)"),
    ("Sum", "seats = ('a', 3)"): Answer("seats", "('a', 3)", "distinct names"),
    ("Sum", "branches = '3'"): Answer("Sum.branches", "is '3'", "a whole number, 0 or more"),
    ("Sum", "fan_out = ['Child']"): Answer("Sum.fan_out", "is ['Child']", "{'Child': 4}"),
    ("Sum", "splits = 'train'"): Answer("Sum.splits", "is 'train'", "('train', 'held_out')"),
    ("Sum", "selects = 'image'"): Answer("Sum.selects", "is 'image'", "a list of strings"),
    ("Sum", "truncated_reward = float('nan')"): Answer("Sum.truncated_reward", "is nan", "finite number or None"),
    ("Sum", "on_code_change = 'keep'"): Answer("Sum.on_code_change", "is 'keep'", "'try' or 'restart' or 'drop'"),
    ("Sum", "sandbox = 'bwrap'"): Answer("Sum.sandbox", "is 'bwrap'", "agentrl.Sandbox()"),
    ("Sum", "mcp_servers = ['files']"): Answer("Sum.mcp_servers", "is ['files']", "agentrl_mcp.MCPServer(command="),
    ("Sum", "reward = 1.0"): Answer("Sum.reward", "is 1.0", "`def reward(self, task, episode)`"),
    ("Sum", "def reward(self, task): return 1.0"): Answer("Sum.reward", "positional", "(self, task, episode)`"),
    ("Sum", "async def prompt(self, task): return ''"): Answer("Sum.prompt", "`def prompt", "without `async`"),
    ("Sum", "prompt = 'Add.'"): Answer("Sum.prompt", "is 'Add.'", "`def prompt(self, task)`"),
    ("Sum", "def run(self, ctx): pass"): Answer("Sum.run", "must be", "`async def run(self, ctx)`"),
    ("Sum", "def __init__(self, size): pass"): Answer("Sum.__init__", "wants size", "options go to `tasks`"),
    ("Sum", "tasks = []"): Answer("Sum.tasks", "must be a class method", "@classmethod"),
    ("Sum", "@classmethod\n    def tasks(cls, split): return []"): Answer(
        "Sum.tasks", "unexpected keyword argument 'seed'", "`tasks(split, seed=0)`"
    ),
    ("Sum", "@classmethod\n    def tasks(cls, split, seed=0): return 3"): Answer(
        "Sum.tasks", "returned 3", "a list of"
    ),
    ("Sum", "@classmethod\n    def tasks(cls, split, *, seed=0): yield 3"): Answer(
        "Sum.tasks", "generator", "a list of"
    ),
    ("Sum", "@classmethod\n    def tasks(cls, split, *, seed=0): return [{'question': ''}]"): Answer(
        "Sum", "a task is dict", "agentrl.Task(id="
    ),
    ("Sum", "@classmethod\n    def tasks(cls, split, *, seed=0): return [agentrl.Task(id=1, data={})]"): Answer(
        "mistake.py", "id=1", "must be a string"
    ),
    ("Sum", "@classmethod\n    def tasks(cls, split, *, seed=0): return [agentrl.Task(id='a', data=[])]"): Answer(
        "mistake.py", "data is list", "must be a dict"
    ),
    ("Sum", "@agentrl.tool\n    def find(self, words): return ''"): Answer(
        "Sum.find", "'words' has no type", "annotate"
    ),
    ("Sum", "@agentrl.tool\n    def find(words: str): return ''"): Answer(
        "Sum.find", "`self` is missing", "its first parameter"
    ),
    ("Agent", "aliases = 3"): Answer("Agent.aliases", "= 3", 'aliases = {"gpt-4o-mini": "main"}'),
    ("Agent", "ignored_fields = 'top_k'"): Answer("Agent.ignored_fields", "one text", '["top_k"]'),
    ("Agent", "failed_reward = 'zero'"): Answer("Agent.failed_reward", "is 'zero'", "a finite number or None"),
    ("Agent", "command = 'python agent.py'"): Answer("Agent.command", "one text", '["python", "agent.py"]'),
    ("Agent", "command = ['python', 3]"): Answer("Agent.command", "is ['python', 3]", "['python', '/path/to/agent.py'"),
    ("Agent", "volatile = [3]"): Answer("Agent.volatile", "is [3]", "a list of strings"),
    ("Agent", "async def play(self, task): pass"): Answer("Agent.play", "positional", "play(self, task, endpoint)`"),
    ("Agent", "task_file = 'nope.jsonl'"): Answer("Agent.task_file", "nope.jsonl", "No such file"),
}
"""Definitions that `agentrl train` refuses before torch is loaded."""

EPISODES = {
    "def prompt(self, task): return 3": Answer("Sum.prompt", "returned 3", "return a string, or a list of messages"),
    "def prompt(self, task): return [{'role': 'user'}]": Answer("Sum.prompt", "{'role': 'user'}", "agentrl.user("),
    "def prompt(self, task): return [agentrl.user(3)]": Answer("user message", "is int", "must be a string"),
    "def reward(self, task, episode): return '1'": Answer("seat 'agent'", "is '1' (str)", "must be a finite number"),
    "def reward(self, task, episode): return None": Answer("Sum.reward", "returned None", "return a number"),
    "def reward(self, task, episode): return task.nope": Answer("mistake.py:", "has no attribute 'nope'", "in reward"),
    "async def run(self, ctx): await ctx.agent('x').act()": Answer("seat 'x'", "has no seat", "its seats: 'agent'"),
    "async def run(self, ctx): await ctx.agent('agent').act('Hi')": Answer("act()", "not str", "agentrl.user("),
    "async def run(self, ctx): ctx.agent('agent').act()": Answer(
        "LiveAgent.act", "never awaited", "`await` is missing"
    ),
    "async def run(self, ctx): ctx.agent('agent', tools=['add'])": Answer("ctx.agent()", "'add'", "agentrl.ToolSpec"),
    "async def run(self, ctx): ctx.metric('size', 'large')": Answer("ctx.metric()", "'large'", "takes a number"),
    "async def run(self, ctx): ctx.metric('size', float('inf'))": Answer("ctx.metric()", "inf", "a finite number"),
    "async def run(self, ctx): ctx.metric('reward', 1.0)": Answer("ctx.metric()", "'reward'", "another name"),
    "async def run(self, ctx): ctx.metric('won/a', 1.0)": Answer("ctx.metric()", "won/<seat> itself", "another name"),
    "async def run(self, ctx): ctx.metric(3, 1.0)": Answer("ctx.metric()", "not 3", "takes a name"),
    "async def run(self, ctx): ctx.spawn('Sum', {})": Answer("ctx.spawn()", "'Sum'", "takes an environment class"),
    "async def run(self, ctx): ctx.sandbox('box')": Answer("ctx.sandbox()", "'box'", "takes an agentrl.Sandbox"),
    "async def run(self, ctx): await ctx.gather([ctx.sleep(0)])": Answer("ctx.gather()", "not [", "ctx.gather(*calls)"),
    "async def run(self, ctx): await ctx.sleep('long')": Answer("ctx.sleep()", "'long'", "takes seconds as a number"),
    "async def run(self, ctx): ctx.uuid().nope()": Answer("mistake.py:", "has no attribute 'nope'", "in run"),
}
"""Methods of a class whose first episode `agentrl env check` finds at fault."""


def case(mistake: str) -> str:
    """Name a case without spaces, at which its name in a report would end."""
    return "_".join(mistake.split())


def test_every_declared_attribute_can_be_checked() -> None:
    names = {}
    for base in (ToolEnvironment, HarnessEnvironment, PettingZooEnvironment, TextArenaEnvironment, GymEnvironment):
        for owner in base.__mro__[:-2]:
            for name, annotation in declared_attributes(owner).items():
                names[name] = fits(owner.__dict__[name], evaluated(annotation, owner))
    assert {"seats", "aliases", "illegal_reward", "sandbox"} <= names.keys()
    assert all(names.values()), names


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    here = tmp_path_factory.mktemp("project")
    listener = socket.socket()  # bound without listening, so that nobody else answers there
    listener.bind(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    files = {
        "env.py": ENVIRONMENT,
        "fails.py": "1 / 0",
        "run.toml": RUN,
        "broken.toml": "name = \n",
        "typo.toml": f"{RUN}step_sise = 8\n",
        "quoted.toml": f'{RUN}step_size = "8"\n',
        "judged.toml": RUN + JUDGE.format(url=url),
        "keyed.toml": RUN + JUDGE.format(url=url).replace('"m"', '"m"\napi_key_env = "NO_SUCH_KEY"'),
        "models/small/config.json": "{}",
        "runs/taken/notes.txt": "mine",
        "my_desk/env.py": "",
        "demo.html": "",
        "tasks.jsonl": '{"question": "1 + 1?"}',
    }
    for name, text in files.items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(text)
    write_sample_run(here / "runs", "demo")
    yield here
    listener.close()


@pytest.fixture
def here(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(project)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return project


def says(message: str, answer: Answer, here: Path) -> None:
    assert not [part for part in answer if part.replace("{here}", str(here)) not in message], message
    assert not re.search(r"Traceback|internal error|agentrl/\w+/\w+\.py", message), message


@pytest.mark.parametrize("command", COMMANDS, ids=case)
def test_a_command_names_place_cause_and_remedy(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # not installed, whatever other tests leave on the path
    try:
        code = main(command.split(" "))
    except SystemExit as error:
        code = int(error.code or 0)
    said = capsys.readouterr()
    assert code == 2, said
    says(said.err, COMMANDS[command], here)


@pytest.mark.parametrize(("name", "line"), CLASSES, ids=case)
def test_a_definition_names_place_cause_and_remedy(
    here: Path, capsys: pytest.CaptureFixture[str], name: str, line: str
) -> None:
    base = {"Sum": ENVIRONMENT, "Agent": HARNESS}[name]
    file = here / f"mistake{abs(hash(line))}" / "mistake.py"  # a module of its own
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"{base}\n    {line}\n")
    (file.parent / "tasks.jsonl").write_text((here / "tasks.jsonl").read_text())
    seats = ['--seats={"main": "solver"}'] if name == "Agent" else []
    assert main(["train", "run.toml", f"--environment.id={file}:{name}", *seats]) == 2
    says(capsys.readouterr().err, CLASSES[name, line], here)


NEAR = {
    "truncated_rewrad = -1.0": Answer("Sum.truncated_rewrad", "not read", "did you mean truncated_reward?"),
    "max_turn = 4": Answer("Sum.max_turn", "not read", "sampling.max_turns, a setting of the run"),
    "task_branch = branch = 'left'": Answer("Sum.branch", "not read", "did you mean branches?"),
}


@pytest.mark.parametrize("line", NEAR, ids=case)
def test_an_attribute_that_is_almost_a_setting_is_a_warning_since_other_code_may_read_it(here: Path, line: str) -> None:
    file = here / f"near{abs(hash(line))}" / "mistake.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"{ENVIRONMENT}\n    {line}\n")
    report = check_environment(f"{file}:Sum", episodes=1)
    assert report.passed, report.text
    says("\n".join(report.warnings), NEAR[line], here)
    (names,) = [check for check in report.checks if check.name == "names"]
    assert len(names.findings) == 1


@pytest.mark.parametrize("line", EPISODES, ids=case)
def test_a_first_episode_names_place_cause_and_remedy(here: Path, line: str) -> None:
    file = here / f"episode{abs(hash(line))}" / "mistake.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"{ENVIRONMENT}\n    {line}\n")
    report = check_environment(f"{file}:Sum", episodes=1)
    assert not report.passed
    says("\n".join(report.findings), EPISODES[line], here)
