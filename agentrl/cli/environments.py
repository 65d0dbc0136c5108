"""`agentrl env …`: list environments, check one, write a new one."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import keyword
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.cli.forked_child import report_progress, run_in_forked_child
from agentrl.cli.output import print_json
from agentrl.core.errors import AgentRLError, CheckFailedError, InputError, StorageError
from agentrl.core.files import temporary_directory
from agentrl.core.text import escape_line, escape_text

if TYPE_CHECKING:
    import argparse

    from agentrl.config.run import RunConfig
    from agentrl.environment.registry import EnvironmentSpec

_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")


def env_list(options: argparse.Namespace) -> int:
    """`agentrl env list`."""
    from agentrl.environment.registry import registered_environments

    environments = [_description(spec) for spec in registered_environments()]
    if options.json:
        print_json(environments)
        return 0
    width = max((len(line["id"]) for line in environments), default=0)
    for line in environments:
        about = f"cannot be used: {line['error']}" if line["error"] else line["description"]
        sys.stdout.write(f"{escape_line(line['id']):<{width}}  {escape_line(about)}\n")
        seats = f"; seats: {', '.join(line['seats'])}" if line["seats"] else ""
        sys.stdout.write(f"{'':<{width}}  from {escape_line(line['entry_point'] + seats)}\n")
    if not environments:
        sys.stdout.write("no environments are installed; write one with `agentrl env new NAME`\n")
    return 0


def _description(spec: EnvironmentSpec) -> dict[str, Any]:
    from agentrl.environment.registry import resolve

    line: dict[str, Any] = {"id": spec.id, "entry_point": spec.entry_point, "description": "", "seats": [], "error": ""}
    try:
        environment = resolve(spec.id)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code: one that cannot be imported hides no other
        kind = "" if isinstance(error, AgentRLError) else f"{type(error).__name__}: "
        return {**line, "error": f"{kind}{error}"}
    description = (inspect.getdoc(environment) or "no docstring").splitlines()[0]
    return {**line, "description": description, "seats": list(environment.seats)}


def env_check(options: argparse.Namespace) -> int:
    """`agentrl env check [ID | FILE.toml] [--model DIR] [--loss NAME] [--advantage NAME] [--scorer NAME]`; exit code 1
    if a check failed."""
    functions = [
        (kind, name) for kind in ("loss", "advantage", "scorer") if (name := getattr(options, kind)) is not None
    ]
    if not functions and options.id is None:
        raise InputError("nothing to check: give an environment, --loss NAME, --advantage NAME or --scorer NAME")
    checked = [_check_function(kind, name) for kind, name in functions]
    if not options.json:
        sys.stdout.writelines(f"{escape_text(each['text'])}\n" for each in checked)
    if options.id is not None:
        answer = _check_environment(options)
        passed = answer["passed"] and all(each["passed"] for each in checked)
        if options.json:
            print_json({**answer, "passed": passed, **({"functions": checked} if checked else {})})
        else:
            sys.stdout.write(escape_text(answer["text"]).rstrip("\n") + "\n")
        checked.append(answer)
    elif options.json:
        print_json(checked[0] if len(checked) == 1 else checked)
    return 0 if all(each["passed"] for each in checked) else CheckFailedError.exit_code


def _check_environment(options: argparse.Namespace) -> dict[str, Any]:
    """Check an environment; returns its `id`, whether it `passed`, the `checks`, and the report's `text`."""
    from agentrl import check_environment
    from agentrl.observe.progress import ProgressLine

    temporary_directory()  # many libraries need one
    progress = ProgressLine(f"checking {options.id}", sys.stderr)
    config = _config_of_run(options.id, options.overrides)
    environment, settings = options.id, dict[str, Any]()
    if config is not None:
        sampling = config.sampling_of(next(iter({**config.trained, **config.policies})))
        limits = sampling.model_dump(include={"temperature", "top_k", "top_p", "min_p", "max_turns", "max_tokens"})
        of_learners = [config.sampling_of(name).max_tokens for name in config.trained]
        limits["max_tokens"] = max(of_learners, default=sampling.max_tokens)
        environment, settings = config.environment.id, {"options": config.environment.options, "sampling": limits}
        settings["gateway_sampling"] = config.gateway.sampling

    def on_progress(phase: str, part: str) -> None:
        progress.phase(phase, part)
        report_progress()

    def check() -> dict[str, Any]:
        with contextlib.closing(progress):
            if config is not None and (refused := _refused_settings(config)) is not None:
                return refused
            report = check_environment(environment, **settings, on_progress=on_progress, hash_order=True)
        if config is not None:
            learners = report.begin("learners")
            for seat, task_id in report.figures.get("unrewarded_seats", {}).items():
                if not config.seat_assignment.policies_of([seat]).isdisjoint(config.trained):
                    learners.fault(
                        f"Never rewarded: {seat}, which {Path(options.id).name} trains (such as in task {task_id!r}): "
                        "training would drop every episode (no_reward)",
                        "Call agent.reward(…) in run(), or let a policy that does not learn hold the seat",
                    )
        _check_tools_shown(report, options.model, config)
        return {
            "passed": report.passed,
            "class": report.figures.get("resume_class"),
            "text": report.text,
            "checks": [asdict(check) for check in report.checks],
        }

    with contextlib.closing(progress):
        answer, problem = run_in_forked_child(check)
    if answer is None:
        text = f"{options.id}: the check did not finish: {problem}"
        answer = {"passed": False, "class": None, "text": text, "checks": []}
    return {"id": options.id, **answer}


def _refused_settings(config: RunConfig) -> dict[str, Any] | None:
    """Return the answer about settings that `agentrl train` would refuse; None if there are none. Plays no episode."""
    from agentrl.app.plan import check_settings

    try:
        check_settings(config)
    except AgentRLError as error:
        finding = {"severity": "fault", "problem": str(error), "advice": ""}
        check = {"name": "settings", "findings": [finding], "figures": {}, "shown": "", "remarks": []}
        text = f"{config.environment.id}: 1 finding\n- {error}"
        return {"passed": False, "class": None, "text": text, "checks": [check]}
    return None


def _config_of_run(id: str, overrides: Sequence[str]) -> RunConfig | None:
    """Return the configuration in a TOML file; None if `id` names an environment."""
    if not id.endswith(".toml"):
        if overrides:
            raise InputError(f"{overrides[0]}: only a run's FILE.toml has settings, and {id} is an environment")
        return None
    from agentrl.config.load import load

    config = load(id, overrides)
    if not isinstance(config.environment.id, str):
        raise InputError(f"{id} trains a mixture; check its environments one by one")
    return config


def _check_tools_shown(report: Any, model: str | None, config: RunConfig | None) -> None:
    """Warn of tools that the episodes' requests offered and a chat template hides; else say how their calls are read.

    Args:
        report: the `EnvironmentReport`, which it extends.
        model: a model directory, which replaces the configuration's `model.path`.
        config: the configuration of the run, if the check has one.
    """
    offered = report.figures.get("offered_tools", {})
    if not offered or (model is None and config is None):
        return
    from agentrl.app.hub import with_local_models
    from agentrl.app.policies import chat_formats, hidden_tools_line
    from agentrl.app.run_parts import make_chat_format
    from agentrl.config.sections import ModelConfig
    from agentrl.rollout.chat.chat_format import TemplateChatFormat

    result = report.begin("model")
    section = (ModelConfig() if config is None else config.model).model_copy(update={"path": model} if model else {})
    holders = {seat: {section.path} for seat in offered}
    try:
        if config is None:
            formats = {section.path: make_chat_format(section)}
        elif (config := with_local_models(config.model_copy(update={"model": section}))) is None:
            result.remarks.append(f"Whether {section.path} sees the tools is unknown: it is not on this machine.")
            return
        else:
            formats = chat_formats(config.rollout_plan, make_chat_format(config.model))
            holders = {seat: config.seat_assignment.policies_of([seat]) for seat in offered}
    except InputError as error:
        result.fault(str(error))
        return
    for name, chat_format in formats.items():
        tools = sorted({tool for seat in offered if name in holders[seat] for tool in offered[seat]})
        if tools and not chat_format.shows_tools:
            result.warn(hidden_tools_line([name], ", ".join(tools)))
        elif tools and isinstance(chat_format, TemplateChatFormat):
            result.remarks.append(
                f"Runs with {name} read tool calls as {chat_format.reply_format.description}. `agentrl evaluate` warns "
                "if the model writes them in another form."
            )


def _check_function(kind: str, name: str) -> dict[str, Any]:
    """Check a loss, an advantage or a scorer; returns its name by kind, whether it `passed`, and the report's text."""

    def check() -> tuple[bool, str]:
        from agentrl.testing.function_check import FunctionReport, check_advantage, check_loss, check_scorer

        checks: dict[str, Callable[[str], FunctionReport]] = {
            "loss": check_loss,
            "advantage": check_advantage,
            "scorer": check_scorer,
        }
        try:
            report = checks[kind](name)
        except AgentRLError as error:
            return False, f"{kind} {name}\n  FAILED {error}"
        return not report.findings, report.text

    answer, problem = run_in_forked_child(check)
    has_passed, text = answer or (False, f"{kind} {name}: the check did not finish: {problem}")
    return {kind: name, "passed": has_passed, "text": text}


def env_new(options: argparse.Namespace) -> int:
    """`agentrl env new NAME`."""
    try:
        directory_here = Path.cwd()
    except FileNotFoundError as error:
        raise InputError("the working directory was removed; go to one that exists") from error
    directory = write_environment(options.name, directory_here)
    if options.json:
        print_json({"directory": str(directory), "files": sorted(FILES)})
        return 0
    name = options.name
    sys.stdout.write(
        f"wrote {name}/: {', '.join(FILES)}\n"
        "Next:\n"
        f"  cd {name}\n"
        "  agentrl env check env.py      # is it sound?\n"
        "  agentrl train train.toml      # the first curve, in one to two CPU minutes\n"
    )
    return 0


def write_environment(name: str, parent: Path) -> Path:
    """Write the files of a new environment into `parent/name`, all or none.

    Raises:
        InputError: the name cannot name a package, is already in use, or the directory exists.
        StorageError: the files cannot be written.
    """
    if _NAME.fullmatch(name) and os.path.lexists(parent / name):
        raise InputError(f"{parent / name} exists; choose another name, or remove it")
    _check_name(name)
    directory = parent / name
    words = {"NAME": name, "CLASS": "".join(part.capitalize() for part in name.split("_"))}
    partial = parent / f".{name}.partial"
    try:
        partial.mkdir()
        for file, text in FILES.items():
            content = re.sub(r"NAME|CLASS", lambda match: words[match[0]], text)
            (partial / file).write_text(content, encoding="utf-8")
        partial.rename(directory)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise StorageError(f"{directory} cannot be written ({error.strerror}); choose another directory") from error
    return directory


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or name.endswith("_"):
        raise InputError(
            f"{name!r} is not a valid package name; use lower-case letters, digits and underscores, starting with a "
            "letter, such as word_game"
        )
    if keyword.iskeyword(name) or keyword.issoftkeyword(name):
        raise InputError(f"{name!r} is a reserved word in Python; choose another name, such as {name}_game")
    from agentrl.environment.registry import registered_environments

    is_module = name in sys.stdlib_module_names or importlib.util.find_spec(name) is not None
    if is_module or name in {spec.id for spec in registered_environments()}:
        kind = "a Python module" if is_module else "an environment"
        raise InputError(f"{name!r} is already {kind}; choose another name, such as my_{name}")


FILES = {
    "env.py": '''"""NAME: describe what the agent does here."""

from random import Random
from typing import Literal

import agentrl


class CLASS(agentrl.ToolEnvironment):
    """Sums of three numbers, with a calculator for two."""

    # The policy's tools. Every parameter needs a type; the policy sees the docstring's first paragraph.
    # `self.task` is the episode's task; other state of the episode may be kept on `self`.
    @agentrl.tool
    def calculate(self, a: int, op: Literal["+", "-", "*"], b: int) -> int:
        """One operation on two integers."""
        return {"+": a + b, "-": a - b, "*": a * b}[op]

    # The reward. `episode.answer` is the first turn that calls no tool; `episode.messages` is the whole conversation.
    # An instruct model answers in a sentence and gets 0 here: compare the last number, or ask for the number alone.
    def reward(self, task: agentrl.Task, episode: agentrl.ToolEpisode) -> float:
        return float(episode.answer.strip() == task.data["answer"])

    # The tasks. Keyword arguments after `seed` are options, set under [environment.options] of train.toml.
    # Held-out tasks must not be training tasks: they distinguish learning from memorizing.
    @classmethod
    def tasks(cls, split: str, *, seed: int = 0, count: int = 1000) -> agentrl.TaskSource:
        return [_task(split, seed, number) for number in range(count)]


def _task(split: str, seed: int, number: int) -> agentrl.Task:
    draw = Random(f"{split} {seed} {number}")  # its own stream, so each task is the same every time
    a, b = draw.randint(1, 99), draw.randint(1, 99)
    c = 2 * draw.randint(1, 49) + (split == "held_out")  # odd where held out: never the same question
    # The bundled model only knows this sentence; a real model understands any.
    question = f"State the final answer to the following arithmetic problem: {a} + {b} - {c} ="
    return agentrl.Task(id=f"{split}-{seed}-{number}", data={"question": question, "answer": str(a + b - c)})


# Several turns without tools, several agents, rewards along the way: write `run` yourself. Remove the `# ` to use it,
# and name the class in train.toml: id = "env.py:CLASSInTurns".
#
# class CLASSInTurns(agentrl.Environment):
#     """The policy may correct itself twice."""
#
#     seats = ("solver",)
#
#     async def run(self, ctx: agentrl.EpisodeContext) -> None:
#         agent = ctx.agent("solver")
#         turn = await agent.act(agentrl.user(ctx.task.data["question"]))
#         for _ in range(2):
#             if not turn.is_cut and turn.text.strip() == ctx.task.data["answer"]:
#                 break
#             turn = await agent.act(agentrl.user("That is wrong. Try again."))
#         agent.reward(float(not turn.is_cut and turn.text.strip() == ctx.task.data["answer"]))
#         # Chance: ctx.rng. Time: ctx.now(), ctx.sleep(). Files, sockets, services: await ctx.effect("name", function).
#
#     @classmethod
#     def tasks(cls, split: str, *, seed: int = 0) -> agentrl.TaskSource:
#         return CLASS.tasks(split, seed=seed)
''',
    "test_env.py": '''"""The environment's tests: `pytest` in this directory. No model and no GPU is needed."""

from pathlib import Path

import agentrl
from agentrl.testing import play

ENVIRONMENT = str(Path(__file__).with_name("env.py")) + ":CLASS"
TASK = agentrl.Task(id="t", data={"question": "20 + 5 - 7 =", "answer": "18"})


def calculate(a: int, op: str, b: int) -> dict[str, object]:
    return {"name": "calculate", "arguments": {"a": a, "op": op, "b": b}}


def test_it_can_be_trained_on() -> None:
    report = agentrl.check_environment(ENVIRONMENT)
    assert report.passed, report.text


def test_the_right_answer_is_rewarded() -> None:
    played = play(ENVIRONMENT, TASK, [calculate(20, "+", 5), calculate(25, "-", 7), "18"])
    assert played.observations == ("20 + 5 - 7 =", "25", "18")
    assert played.reward == 1.0


def test_a_wrong_answer_is_not() -> None:
    assert play(ENVIRONMENT, TASK, ["19"]).reward == 0.0


def test_no_held_out_task_is_trained_on() -> None:
    environment = type(agentrl.make(ENVIRONMENT))
    questions = [{task.data["question"] for task in environment.tasks(split)} for split in ("train", "held_out")]
    assert questions[0].isdisjoint(questions[1])
''',
    "train.toml": """# agentrl train train.toml
# Every field, with its default and why: docs/reference/configuration.md, or `agentrl train train.toml --dry-run`.
name = "NAME"
steps = 40            # optimizer steps

[environment]
id = "env.py:CLASS"   # next to this file

[model]
path = "agentrl.environments:calculator/model"   # 0.84 M parameters, part of agentrl; or a directory of yours

[policies.solver]
learning_rate = 3e-4  # without it, by the size of the model
step_size = 64        # episodes per optimizer step

[credit]
group_size = 8        # episodes of one task, compared with each other

[sampling]
max_tokens = 32       # longest turn
max_turns = 6

[engine]
slots = 96
max_context = 192     # longest conversation, in tokens

[trainer]
loss.normalizer = 64  # sampled tokens of a typical episode

[evaluation]
tasks = 256           # held-out tasks, before the first step and after the last
""",
    "README.md": """# NAME

Describe the task, the tools, the reward and the options here.

```
pytest                        # its tests
agentrl env check env.py      # plays it with a random policy, kills and resumes it, explains failures
agentrl train train.toml      # trains on it, in one to two CPU minutes
agentrl episode list NAME     # what the agent did
```

agentrl does not install pytest: `pip install -c constraints.txt pytest` in its directory.

`env.py` is the environment, `test_env.py` its tests, `train.toml` the training configuration. The bundled model
has only learned to write numbers and to call `calculate`. For other tools and words, use an instruction-tuned
model: `agentrl train train.toml --model DIR`.

`pip install -e .` registers it by name: `agentrl env list`, `id = "NAME"`.
""",
    "__init__.py": '''"""The environment NAME."""

from NAME.env import CLASS

__all__ = ["CLASS"]
''',
    "pyproject.toml": """[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "NAME"
version = "0.1.0"
requires-python = ">=3.11.4"
dependencies = []  # besides agentrl, which is not on the package index: install it first

[project.entry-points."agentrl.environments"]
NAME = "NAME:CLASS"

[tool.setuptools]
packages = ["NAME"]
package-dir = { "NAME" = "." }
package-data = { "NAME" = ["train.toml"] }

[tool.pytest.ini_options]  # without this table, pytest reads a parent directory's, such as agentrl's checkout
testpaths = ["test_env.py"]
""",
}
"""Files of `env new`, as texts by name; NAME and CLASS stand for the environment's names."""
