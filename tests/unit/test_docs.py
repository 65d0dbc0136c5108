"""The README and docs/: links lead somewhere, commands and settings exist, what is promised has its test."""

from __future__ import annotations

import ast
import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from agentrl.cli.commands import make_parser as _parser
from agentrl.config.mistakes import all_keys
from agentrl.config.run import RunConfig
from agentrl.observe.metrics import find_registered_metric
from agentrl_tinker.config import ServerConfig
from benchmarks.figures import read_bounds
from tests.markdown_pages import HEADING, LINK, PAGES, ROOT, anchor_of, blocks, broken_links, prose, python_of
from tests.outside_agents.environments import LIBRARIES, REQUIREMENTS

NEEDED = {"environment": {"id": "calculator"}, "model": {"path": "agentrl.environments:calculator/model"}}


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def commands(page: Path) -> list[str]:
    """Command lines of agentrl in blocks."""
    lines = (
        line for block in blocks(page) if block.language in {"", "sh", "console"} for line in block.text.splitlines()
    )
    shown = (line.removeprefix("$ ").split("  #")[0] for line in lines)
    return [line for line in shown if line.startswith("agentrl ")]


def mentions(page: Path) -> list[str]:
    """Commands of agentrl between backticks in the text; their arguments may be left out."""
    return re.findall(r"`(agentrl [^`…|]+)`", prose(page))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_link_leads_somewhere(page: Path) -> None:
    assert list(broken_links(page)) == []


def test_every_promise_names_tests_that_exist_and_that_make_test_runs() -> None:
    page = ROOT / "docs/explanation/durability.md"
    rows = [line for line in prose(page).splitlines() if line.startswith("| ") and "tests/" in line]
    assert len(rows) > 20
    for row in rows:
        proofs = [(text, path) for text, path in LINK.findall(row) if re.match("test_|Test", text)]
        proofs += [("", f"../../{path}") for path in re.findall(r"`(tests/[\w/]+\.py)`", row)]
        assert proofs, row
        sources = [source_of(page.parent / path, test) for test, path in proofs]
        assert not any(source.startswith("@pytest.mark.exhaustive") for source in sources), f"not in make test: {row}"


def source_of(file: Path, test: str) -> str:
    """The source of a test with its decorators, or of the whole file where `test` is empty."""
    source = file.read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == test:
            first = min([node, *node.decorator_list], key=lambda part: part.lineno)
            return "\n".join(source.splitlines()[first.lineno - 1 : node.end_lineno])
        if isinstance(node, ast.Assign) and test in [
            target.id for target in node.targets if isinstance(target, ast.Name)
        ]:
            return ast.unparse(node)
    assert not test, f"{file} has no {test}"
    return source


KNOWN = [
    re.sub(r"<\w+>", r"[^.]+", re.escape(key).replace(r"\<", "<").replace(r"\>", ">")) for key in all_keys(RunConfig)
]
"""A pattern for each setting."""
NO_SETTINGS = {"engine.log", "model.safetensors"}


def test_settings_named_in_the_text_exist() -> None:
    sections = "|".join(sorted({key.partition(".")[0] for key in all_keys(RunConfig) if "." in key}))
    pattern = re.compile(rf"`((?:{sections})\.[\w.]+)(?=[` ])")
    named = [(name(page), key) for page in PAGES for key in pattern.findall(prose(page)) if key not in NO_SETTINGS]
    assert len(named) > 100
    assert not [(page, key) for page, key in named if not any(re.fullmatch(pattern, key) for pattern in KNOWN)]


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=name)
def test_every_command_parses(page: Path) -> None:
    for line in commands(page):
        options, rest = _parser().parse_known_args(shlex.split(line)[1:])
        assert not rest or options.takes_overrides, line
        for override in rest:
            key = override.removeprefix("--").partition("=")[0]
            assert any(re.fullmatch(pattern, key) for pattern in KNOWN), f"{line}: no setting {key}"
        metric = getattr(options, "metric", None)
        assert metric in (None, "NAME") or find_registered_metric(metric), f"{line}: no metric {metric}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_piece_of_toml_is_a_configuration(page: Path) -> None:
    for block in blocks(page):
        if block.language == "toml" and block.executed:
            data = tomllib.loads(block.text)
            if "models" in data:
                ServerConfig.model_validate(data)
            else:
                RunConfig.model_validate(NEEDED | data)


@pytest.mark.parametrize("page", [page for page in PAGES if python_of(page)], ids=name)
def test_python_blocks_compile_together(page: Path) -> None:
    compile("\n\n".join(python_of(page)), name(page), "exec")


@pytest.mark.parametrize("page", [page for page in PAGES if mentions(page)], ids=name)
def test_every_command_in_the_text_exists(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for mention in mentions(page):
        with pytest.raises(SystemExit) as ended:
            _parser().parse_known_args([*shlex.split(mention)[1:], "--help"])
        assert ended.value.code == 0, f"{mention}: {capsys.readouterr().err}"


def test_files_named_in_the_text_exist() -> None:
    pattern = re.compile(r"`((?:agentrl|benchmarks|docs|environments|examples|tests)/[\w./-]+\.\w+)`")
    named = [(name(page), path) for page in PAGES for path in pattern.findall(prose(page))]
    assert len(named) > 5
    assert not [(page, path) for page, path in named if not (ROOT / path).exists()]


def test_the_page_of_agent_libraries_is_what_is_trained() -> None:
    page = (ROOT / "docs/tutorials/outside_agents.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:-1] for line in page.partition("| to be set |")[2].split("\n\n")[0].split("\n")[2:]]
    assert len(rows) == len(LIBRARIES)
    for (library, environment), (title, settings, tool) in zip(LIBRARIES.items(), rows, strict=True):
        version = REQUIREMENTS[library][0].partition("==")[2]
        assert version.startswith(title.split("(")[0].split()[-1]), title
        set_here = {name for name in ("failed_reward", "ignored_fields") if name in vars(environment)}
        assert {name for name in ("failed_reward", "ignored_fields") if f"`{name} = " in settings} == set_here
        lines = [f"{name} = {json.dumps(vars(environment)[name])}" for name in set_here - {"ignored_fields"}]
        variables = [word for word in environment.command[1:] if "=" in word]
        assert all(f"`{line}`" in settings for line in (*lines, *variables)), settings
        assert (environment.unknown_tool or "it is told") in tool
    assert (ROOT / "tests/outside_agents/programs/pydantic_ai_agent.py").read_text(encoding="utf-8") in page


def test_nothing_is_promised_for_later() -> None:
    later = re.compile(
        r"\b(coming soon|planned|roadmap|TODO|not yet implemented|in a future|upcoming)\b", re.IGNORECASE
    )
    assert not [(name(page), found[0]) for page in PAGES for found in later.finditer(page.read_text(encoding="utf-8"))]


def test_every_example_and_benchmark_has_its_line_and_numbers_have_no_gap() -> None:
    listed = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    files = sorted(path.name for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".toml", ".yaml"))
    assert not [name for name in files if f"`{name}`" not in listed]
    numbers = sorted({int(name[:2]) for name in files if name[:2].isdecimal()})
    assert numbers == list(range(1, len(numbers) + 1))
    listed = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    assert not [benchmark.name for benchmark in read_bounds()[1] if f"| `{benchmark.name}` |" not in listed]


def test_the_readme_is_read_in_a_minute() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 750
    assert len(text.partition("\nmake demo ")[0].split()) <= 150, "the first command stands on the first screen"
    assert len(re.findall(r"\]\(", text)) <= 15


def test_every_page_is_two_clicks_from_the_readme() -> None:
    near = {page.parent / target.partition("#")[0] for page, target in _first_clicks()}
    assert ROOT / "docs/index.md" in near
    far = {page for page in PAGES if page.is_relative_to(ROOT / "docs")} - {page.resolve() for page in near}
    assert far == set()


QUESTIONS = {
    "my reward does not rise": ("how-to/faq.md#the-reward-does-not-rise", "**Alarms.**"),
    "my calls are not read": ("how-to/faq.md#the-reward-does-not-rise", '`model.reply_format = "json"`'),
    "train my OpenAI agent": ("tutorials/outside_agents.md", "agentrl.HarnessEnvironment"),
    "train two policies": ("how-to/several_agents.md", "[policies.small.lora]"),
    "resume after a crash": ("how-to/recovery.md", "--resume"),
    "use two machines": ("how-to/several_gpus.md#several-machines", "ray start --head"),
    "export the adapter": ("tutorials/getting_started.md#export-the-trained-adapter-or-model", "merge_and_unload"),
    "what does staleness do": ("explanation/off_policy.md", "**The mean staleness is at most S**"),
    "reward by a judge": ("how-to/scores.md#judges-and-reward-models", "judge(rubric"),
    "how much memory": ("how-to/memory.md", "agentrl doctor"),
    "log to W&B": ("reference/metrics.md#wb-tensorboard-trackio", '`sinks = ["wandb"]`'),
    "credit per turn": ("reference/algorithms.md#credit-per-turn", "`to_go`"),
}
"""What people ask: where a link of the README or the index leads, and what answers it there."""


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_is_answered_within_300_words_behind_a_link_that_is_found(question: str) -> None:
    address, answer = QUESTIONS[question]
    file, _, anchor = address.partition("#")
    assert (ROOT / "docs" / address) in {page.parent / target for page, target in _first_clicks()}
    text = (ROOT / "docs" / file).read_text(encoding="utf-8")
    if anchor:
        text = next(text[match.end() :] for match in HEADING.finditer(text) if anchor_of(match[1]) == anchor)
    before, found, _ = text.partition(answer)
    assert found
    assert len(before.split()) <= 300


def _first_clicks() -> list[tuple[Path, str]]:
    """The links of the README and of the index, which it links, each with its page."""
    pages = (ROOT / "README.md", ROOT / "docs/index.md")
    links = [(page, target) for page in pages for _, target in LINK.findall(page.read_text(encoding="utf-8"))]
    return [(page, target) for page, target in links if "://" not in target]
