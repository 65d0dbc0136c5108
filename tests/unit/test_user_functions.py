"""Losses and advantages of users: found, identified by their code, refused where they cannot be recorded, evaluated."""

from __future__ import annotations

import inspect
import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.cli.main import main
from agentrl.config.algorithms import LOSSES
from agentrl.core.custom_functions import FunctionDeclaration, capture_function_code, find_function, find_function_code
from agentrl.core.errors import ConfigError, GroupTooSmallError, InputError, LossError, NonFiniteError
from agentrl.core.records import EpisodeDataLocation, TrajectoryCredit, Unit
from agentrl.core.tokens import TrajectoryRow
from agentrl.credit.estimators import AdvantageEstimator, make_advantage_estimator
from agentrl.credit.group import Group
from agentrl.credit.release import WholeGroupRelease
from agentrl.credit.step_credit import OptimizerStepCreditAssigner
from agentrl.journal.run_log import RunStart
from agentrl.learn.trainer import PolicyTrainer
from agentrl.orchestrator.buffer import EpisodeBuffer
from agentrl.testing.function_check import check_advantage, check_loss
from tests.learn_cases import Episodes, make_rows, run_config, write_model, write_tokenizer
from tests.loss_cases import ALL_LOSSES, PACKAGED_ADVANTAGES, batch_of
from tests.markdown_pages import ROOT, python_of
from tests.support import user_functions
from tests.support.builders import make_episode_header, make_spec
from tests.unit.test_supervisor import Lives

SCRIPT = str(Path(user_functions.__file__).resolve())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_model(tmp_path_factory.mktemp("model"))
    write_tokenizer(path)
    return path


def step(
    model: Path, directory: Path, loss: str, rows: list[TrajectoryRow] | None = None, **trainer: Any
) -> tuple[float, float]:
    """Loss and gradient norm of a step."""
    episodes = Episodes(rows or make_rows(0, 8))
    section = {"name": loss, **trainer.pop("section", {})}
    trainer_under_test = PolicyTrainer(
        run_config(model, loss=section, **trainer).trainer_plan, directory, read=episodes.read
    )
    trainer_under_test.start()
    trainer_under_test.forward_backward(episodes.batch())
    report = trainer_under_test.optim_step("policy", 1)
    return report.loss, report.grad_norm


def test_a_function_is_its_slice_of_the_file(tmp_path: Path) -> None:
    code = find_function_code("loss", f"{SCRIPT}:sapo", key="loss")
    assert capture_function_code(user_functions.sapo, "loss", key="loss") == code
    assert code.reference == f"{SCRIPT}:sapo"
    text = Path(SCRIPT).read_text()
    copy = tmp_path / "copy.py"

    def digest(changed: str) -> str:
        copy.write_text(changed)
        return find_function_code("loss", f"{copy}:sapo", key="loss").digest

    assert digest(text) == code.digest
    assert digest(text.replace('"as asked"', '"otherwise"').replace("# ", "#  ")) == code.digest
    assert digest(text.replace("TEMPERATURE = 1.05", "TEMPERATURE = 1.06")) != code.digest
    assert digest(text.replace("advantages > 0", "advantages >= 0")) != code.digest
    assert digest(text.replace('if __name__ == "__main__":', "raise SystemExit(1)\nif True:")) == code.digest


def test_the_recorded_digest_of_a_moved_file_is_found_by_its_name() -> None:
    code = {"/a/mine.py:f": "1", "/b/mine.py:f": "2", "/a/mine.py": "3", "package.mine:f": "4"}
    start = RunStart(lineage=0, began_at=0.0, code=code)
    assert start.digests_of("/a/mine.py:f") == {"1"}, "one that is where it was, by its place"
    assert start.digests_of("/c/mine.py:f") == {"1", "2"}
    assert start.digests_of("/c/mine.py") == {"3"}
    assert start.digests_of("package.mine:f") == {"4"}
    assert start.digests_of("/c/mine.py:g") == set()


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (user_functions.unmarked, "@agentrl.scorer"),
        (user_functions.centred, "marked as advantage"),
        (user_functions.closure(2.0), "closure"),
        (3, "function"),
    ],
)
def test_what_cannot_be_recorded_is_refused(function: object, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        capture_function_code(function, "loss", key="loss")


@pytest.mark.parametrize(("name", "value"), [("side", lambda advantages: advantages), ("TEMPERATURE", 2.0)])
def test_what_was_patched_by_hand_is_refused(name: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_functions, name, value)
    with pytest.raises(ConfigError, match=name):
        capture_function_code(user_functions.sapo, "loss", key="loss")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import agentrl\nfrom helper import x\n@agentrl.loss\ndef f(batch):\n    return x\n", "imports helper"),
        ("import agentrl\n@agentrl.loss\ndef g(batch):\n    return 1\n", "'f'"),
        ("def f(:\n", "invalid syntax"),
        ("def f(batch):\n    return 1\n", "@agentrl.loss"),
        ("import agentrl\nx = 1 / 0\n@agentrl.loss\ndef f(batch):\n    return x\n", "ZeroDivisionError"),
    ],
)
def test_a_file_that_cannot_be_shipped_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        find_function_code("loss", f"{path}:f", key="trainer.loss.name")


def test_a_loss_gives_the_same_step_however_it_is_split(model: Path, tmp_path: Path) -> None:
    whole = step(model, tmp_path / "a", f"{SCRIPT}:sapo")
    assert whole[1] > 0
    for number, (name, tokens) in enumerate((("sapo", 40), ("sapo_per_token", 8192), ("sapo_per_token", 40))):
        assert step(model, tmp_path / str(number), f"{SCRIPT}:{name}", micro_batch_tokens=tokens) == pytest.approx(
            whole, rel=1e-5
        )
    one, other = (
        step(model, tmp_path / f"s{tokens}", f"{SCRIPT}:sequence_ratio", micro_batch_tokens=tokens)
        for tokens in (8192, 40)
    )
    assert one == pytest.approx(other, rel=1e-5)


def test_a_sequence_mean_gives_the_same_step_however_it_is_split(model: Path, tmp_path: Path) -> None:
    found = [
        step(model, tmp_path / f"s{tokens}", "ppo", section={"normalizer": "sequences"}, micro_batch_tokens=tokens)
        for tokens in (8192, 40)
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-5, abs=1e-7)  # the loss is near 0


def test_options_reach_the_loss_and_are_checked(model: Path, tmp_path: Path) -> None:
    one, two = (
        step(model, tmp_path / str(scale), f"{SCRIPT}:sapo", section={"scale": scale})[0] for scale in (1.0, 2.0)
    )
    assert two == pytest.approx(2 * one)
    for options, reason in (({"scales": 1}, "its options: scale"), ({"scale": "x"}, "expected float")):
        with pytest.raises(ConfigError, match=reason):
            PolicyTrainer(run_config(model, loss={"name": f"{SCRIPT}:sapo", **options}).trainer_plan, tmp_path)


@pytest.mark.parametrize(
    ("name", "error", "reason"),
    [
        ("raises", LossError, "ArithmeticError: as asked"),
        ("of_another_shape", LossError, r"returned \(\)"),
        ("detached", LossError, "batch.logprobs"),
        ("freed", LossError, "backward"),
        ("nan", NonFiniteError, "loss nan .*agentrl env check --loss"),
    ],
)
def test_a_bad_loss_is_named(name: str, error: type[Exception], reason: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(error, match=reason):
        step(model, tmp_path, f"{SCRIPT}:{name}")


def test_a_loss_or_an_advantage_that_breaks_its_contract_ends_a_run_with_one_exit_code() -> None:
    assert LossError.exit_code == InputError.exit_code == 2


def test_an_estimator_credits_each_agent_and_each_turn() -> None:
    states = ((b"a", b"b"),) * 2
    group = Group(rewards=(1.0, 0.0), episodes=("e0", "e1"), turn_rewards=(((0, 1.0),), ()), turn_states=states)
    estimator = make_advantage_estimator(f"{SCRIPT}:centred", {})
    assert [(each.value, each.baseline) for each in estimator(group)] == [(0.5, 0.5), (-0.5, 0.5)]
    assert [each.by_turn for each in estimator.to_go(group)] == [(0.5, 0.0), (-0.5, 0.0)]
    by_turn = AdvantageEstimator(
        name="by_turn",
        function=lambda group: [[1.0, -1.0], [-1.0, 1.0]],
        mark=FunctionDeclaration("advantage"),
        options={},
    )
    with pytest.raises(InputError, match="turn_credit = 'sum'"):
        by_turn.to_go(group)
    with pytest.raises(InputError, match="too_few"):
        make_advantage_estimator(f"{SCRIPT}:too_few", {})(group)
    with pytest.raises(InputError, match="pass_at_k"):
        make_advantage_estimator("pass_at_k", {"k": 0})(group)
    with pytest.raises(GroupTooSmallError):
        make_advantage_estimator("pass_at_k", {"k": 2})(group)
    with pytest.raises(ConfigError, match=r"credit\.advantage"):
        make_advantage_estimator("pass_at_k", {"n": 2})


def test_an_estimator_over_the_step_compares_each_seat_on_its_own() -> None:
    credits = OptimizerStepCreditAssigner(make_advantage_estimator(f"{SCRIPT}:over_the_step", {}), group_size=2)
    unit = Episodes(make_rows(0, 1)).units()[0]
    units: list[tuple[str, Unit]] = [
        ("env", replace(unit, episode_id=f"e{n}", credits=(TrajectoryCredit(seat, 0, reward, reward, 0.0),)))
        for n, (seat, reward) in enumerate((("a", 1.0), ("b", 5.0), ("a", 0.0), ("b", 7.0)))
    ]
    assert [unit.credits[0].advantage for unit in credits.credited("p", units)] == [0.5, -1.0, -0.5, 1.0]


def test_a_missing_function_ends_a_run_before_it_begins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text(
        '[environment]\nid = "calculator"\n[model]\npath = "agentrl.environments:calculator/model"\n'
        '[trainer.loss]\nname = "mine.py:sapo"\n'
    )
    assert main(["train", str(toml), f"--directory={tmp_path}/runs"]) == 2
    assert "there is no file" in capsys.readouterr().err
    assert not (tmp_path / "runs" / "run").exists()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["trainer.loss.alhpa=0.3"], "its options: max_ratio, trust_region"),
        (["trainer.loss.name=sapo", "trainer.loss.clip_high=0.3"], "its options: positive, negative"),
        (["trainer.loss.name=mine:nope"], "mine defines no function 'nope' at its top level"),
        (["trainer.loss.name=mine.py:nope"], "defines no function 'nope' at its top level"),
        (["trainer.loss.name=mine:sapo", "trainer.loss.alhpa=0.3"], "its options: scale"),
        (["credit.advantage.name=mine:centred", "credit.advantage.k=3"], "its options: none"),
        (["credit.advantage.name=max_rl", "credit.advantage.k=3"], "its options: none"),
    ],
)
@pytest.mark.parametrize("dry", [True, False])
def test_a_function_that_is_not_there_or_options_that_do_not_fit_are_refused_also_in_a_dry_run(
    settings: list[str],
    said: str,
    dry: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "run.toml").write_text(
        '[environment]\nid = "calculator"\n[model]\npath = "agentrl.environments:calculator/model"\n'
    )
    (tmp_path / "mine.py").write_text(Path(SCRIPT).read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    given = [f"--{setting}" for setting in settings]
    assert main(["train", "run.toml", *given, *(["--dry-run"] if dry else [])]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_file_that_ends_the_program_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import sys\nimport agentrl\nX = sys.exit(0)\n@agentrl.loss\ndef f(batch):\n    return X\n")
    toml = tmp_path / "run.toml"
    for environment, loss in (("calculator", f"{file}:f"), (f"{file}:f", "ppo")):
        toml.write_text(
            f'[environment]\nid = "{environment}"\n[model]\npath = "agentrl.environments:calculator/model"\n'
            f'[trainer.loss]\nname = "{loss}"\n'
        )
        assert main(["train", str(toml), f"--directory={tmp_path}/runs"]) == 2
        assert f"{file}" in (told := capsys.readouterr().err)
        assert "SystemExit: 0" in told
        assert not (tmp_path / "runs" / "run").exists()


def test_the_advantage_that_runs_is_the_one_that_was_recorded(tmp_path: Path) -> None:
    """It is loaded once per start, and a change of its file afterwards does not reach the run."""
    loads, file = tmp_path / "loads", tmp_path / "mine.py"
    file.write_text(
        "from pathlib import Path\nimport agentrl\n"
        f"LOADS = Path({str(loads)!r})\n"
        "LOADED = LOADS.write_text((LOADS.read_text() if LOADS.exists() else '') + 'loaded ')\n"
        "@agentrl.advantage\ndef f(group):\n    return [LOADED * reward for reward in group.rewards]\n"
    )
    lives = Lives(losses=[])
    lives.starting = lambda: file.write_text("gone")
    lives.run(tmp_path, advantage=f"{file}:f")
    assert loads.read_text() == "loaded "
    credits = [credit for unit in lives.trainers[0].batches[0].units for credit in unit.credits]
    assert [credit.advantage for credit in credits] == [7.0 * credit.reward for credit in credits]


@pytest.mark.parametrize("reference", ["{}/binary.py:f", "{}/absent.py:f", "a\0.py:f"])
def test_a_file_that_cannot_be_read_is_told(tmp_path: Path, reference: str) -> None:
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"cannot be read|there is no file|give `module:function`"):
        find_function_code("loss", reference.format(tmp_path), key="trainer.loss.name")


@pytest.mark.parametrize("name", LOSSES)
def test_the_check_passes_every_built_in_loss(name: str) -> None:
    assert check_loss(name).findings == []


def from_the_page(name: str, directory: Path) -> str:
    """The reference of a function that docs/how-to/own_losses.md shows."""
    (text,) = [text for text in python_of(ROOT / "docs/how-to/own_losses.md") if f"def {name}(" in text]
    script = directory / "mine.py"
    script.write_text(f"import torch\nimport agentrl\n{text}", encoding="utf-8")
    return f"{script}:{name}"


def test_the_page_s_loss_with_the_kl_in_the_reward_is_that_of_a_loop(tmp_path: Path) -> None:
    reference_name = from_the_page("kl_in_reward", tmp_path)
    assert check_loss(reference_name).findings == []
    _, function = find_function("loss", reference_name, key="trainer.loss.name")
    agents, groups = [0, 0, 1, 2, 2, 2, 3], [0, 0, 0, 1, 1, 1, 1]
    logprobs, reference = [-1.0, -2.0, -0.5, -1.5, -0.2, -3.0, -0.7], [-1.2, -1.0, -0.9, -0.4, -0.3, -2.0, -2.5]
    advantages = [1.0, 1.0, -1.0, 0.5, 0.5, 0.5, -0.5]
    batch = batch_of(
        logprobs, logprobs, advantages, reference=reference, ids={"agent": agents, "group": groups, "row": agents}
    )
    kl = dict.fromkeys(agents, 0.0)
    for agent, own, other in zip(agents, logprobs, reference, strict=True):
        kl[agent] += own - other
    centred = [kl[0] - (kl[0] + kl[1]) / 2, kl[1] - (kl[0] + kl[1]) / 2]
    centred += [kl[2] - (kl[2] + kl[3]) / 2, kl[3] - (kl[2] + kl[3]) / 2]
    expected = [
        -(advantage - 0.1 * centred[agent]) * own
        for agent, advantage, own in zip(agents, advantages, logprobs, strict=True)
    ]
    assert function(batch, beta=0.1).tolist() == pytest.approx(expected)


def test_the_page_s_loss_of_the_tokens_of_largest_entropy(tmp_path: Path) -> None:
    reference = from_the_page("top_entropy", tmp_path)
    assert check_loss(reference).findings == []
    _, function = find_function("loss", reference, key="trainer.loss.name")
    logprobs, entropies = [-1.0, -2.0, -0.5, -1.5, -0.2], [0.1, 0.9, 0.3, 0.8, 0.2]
    batch = batch_of(logprobs, logprobs, [2.0] * 5)
    batch.entropies = torch.tensor(entropies)
    kept = sorted(entropies)[-2:]
    expected = [-2.0 * own if entropy in kept else 0.0 for own, entropy in zip(logprobs, entropies, strict=True)]
    assert function(batch, quantile=0.4).tolist() == pytest.approx(expected)


def test_the_page_s_advantage_over_the_step_is_above_the_mean_of_each_group(tmp_path: Path) -> None:
    reference = from_the_page("above_group_mean", tmp_path)
    assert check_advantage(reference).findings == []
    group = Group(rewards=(1.0, 5.0, 0.0, 7.0), episodes=("a", "b", "c", "d"), groups=("x", "y", "x", "y"))
    assert [each.value for each in make_advantage_estimator(reference, {})(group)] == [0.5, -1.0, -0.5, 1.0]


def test_the_page_has_every_option_with_its_default() -> None:
    """In the table of losses, in its column; in that of advantages, beside the formula."""
    rows = [
        line
        for line in (ROOT / "docs/reference/algorithms.md").read_text(encoding="utf-8").splitlines()
        if line[:3] == "| `"
    ]
    for name, function in (ALL_LOSSES | PACKAGED_ADVANTAGES).items():
        row = next(row for row in rows if f"`{name}`" in row.split(" | ")[0])
        shown = row.split(" | ")[2] if name in ALL_LOSSES else row
        for option in list(inspect.signature(function).parameters.values())[1:]:
            assert f"`{option.name} = {json.dumps(option.default)}`" in shown, name
    for row in rows:
        of_row = [ALL_LOSSES[name] for name in re.findall(r"`(\w+)`", row.split(" | ")[0]) if name in ALL_LOSSES]
        known = {option for function in of_row for option in inspect.signature(function).parameters}
        if of_row:
            assert set(re.findall(r"`(\w+) = ", row.split(" | ")[2])) <= known, row


@pytest.mark.parametrize(
    ("name", "finding"),
    [
        ("raises", "raised ArithmeticError: as asked"),
        ("of_another_shape", "returned ()"),
        ("detached", "was it detached?"),
        ("freed", "not call backward()"),
        ("nan", "the loss of a token is nan"),
        ("overflows", "of a token is inf"),
        ("noisy", "it draws random numbers"),
        ("writes", "it changed batch.advantages"),
        ("by_position", "with its rows in another order"),
        ("not_per_token", 'groups="token") promises that a token\'s loss depends on that token alone'),
        ("not_per_token", 'declare groups="step"'),
        ("by_row", 'declare groups="row"'),
        ("by_level_of_another", 'groups="turn") promises that a token\'s loss depends on the tokens of its turn alone'),
        ("undeclared_reference", "It reads reference_logprobs: mark it @agentrl.loss(reference=True)"),
        ("undeclared_divergence", "It reads reference_kl: mark it @agentrl.loss(divergence=True)"),
    ],
)
def test_the_check_names_what_a_loss_breaks(name: str, finding: str) -> None:
    assert any(finding in each for each in check_loss(f"{SCRIPT}:{name}").findings)


TENSORS = [name for name, value in vars(batch_of([-1.0], [-1.0], [1.0])).items() if isinstance(value, torch.Tensor)]
WRITES = """
import agentrl, torch

@agentrl.loss
def writes(batch):
    with torch.no_grad():
        batch.{name}.copy_(~batch.{name} if batch.{name}.dtype == torch.bool else batch.{name} + 1)
    return -batch.advantages.detach() * batch.logprobs
"""


@pytest.mark.parametrize("name", TENSORS)
def test_a_loss_that_writes_to_any_column_is_named(name: str, tmp_path: Path) -> None:
    script = tmp_path / "writing.py"
    script.write_text(WRITES.format(name=name), encoding="utf-8")
    assert any(f"it changed batch.{name}," in finding for finding in check_loss(f"{script}:writes").findings)


def test_the_check_gives_a_loss_the_columns_that_it_declares() -> None:
    assert check_loss(f"{SCRIPT}:declared_reference").findings == []
    assert check_loss(f"{SCRIPT}:asks_for_the_reference").findings == [], "training gives None, too"


@pytest.mark.parametrize(
    ("name", "finding"),
    [
        ("too_few", "returned 1 advantages for a group of 4"),
        ("first_is_best", "depends on its place in the group"),
        ("divides", "rewards of 0 [0.0, 0.0, 0.0, 0.0]: the advantage divides raised ZeroDivisionError"),
    ],
)
def test_the_check_names_what_an_advantage_breaks(name: str, finding: str) -> None:
    (found,) = check_advantage(f"{SCRIPT}:{name}").findings
    assert finding in found


def test_the_command_checks_functions_and_says_what_would_be_faster(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "check", "--loss", f"{SCRIPT}:sapo", "--advantage", "gdpo"]) == 0
    said = capsys.readouterr().out
    assert 'groups="token") saves a forward pass' in said
    assert main(["env", "check", "--loss", f"{SCRIPT}:nan"]) == 1
    assert main(["env", "check", "--loss", f"{SCRIPT}:unmarked"]) == 1
    assert "put @agentrl.loss" in capsys.readouterr().out
    assert main(["env", "check"]) == 2


def test_an_estimator_sees_how_long_each_agent_of_a_group_was() -> None:
    """OPO (arXiv:2505.23585): the baseline is the mean reward, weighted by length."""

    def opo(group: Group) -> list[float]:
        weighted = sum(n * reward for n, reward in zip(group.tokens, group.rewards, strict=True))
        return [reward - weighted / sum(group.tokens) for reward in group.rewards]

    estimator = AdvantageEstimator(name="opo", function=opo, mark=FunctionDeclaration("advantage"), options={})
    buffer = EpisodeBuffer(["policy"], WholeGroupRelease(["policy"], estimator))
    specs = [make_spec(f"e{number}", group_size=2) for number in range(2)]
    for spec in specs:
        buffer.admit(spec)
    for spec, reward, tokens in zip(specs, (1.0, 0.0), (30, 10), strict=True):
        buffer.record_end(spec, make_episode_header(spec, reward=reward, tokens=tokens))
    credits = [ready.unit.credits[0] for ready in buffer.pop_ready("policy", 2)]
    assert [(each.advantage, each.baseline) for each in credits] == [(0.25, 0.75), (-0.75, 0.75)]


def test_an_estimator_sees_the_mean_of_earlier_groups() -> None:
    seen = []

    def centred(group: Group) -> list[float]:
        seen.append(group.history)
        return [reward - group.mean for reward in group.rewards]

    estimator = AdvantageEstimator(name="centred", function=centred, mark=FunctionDeclaration("advantage"), options={})
    buffer = EpisodeBuffer(["policy"], WholeGroupRelease(["policy"], estimator, uses_history=True))
    for first, rewards in ((0, (1.0, 0.5)), (2, (0.0, 0.0))):
        specs = [make_spec(f"e{first + number}", group_id=f"g{first}", group_size=2) for number in range(2)]
        for spec in specs:
            buffer.admit(spec)
        for spec, reward in reversed(list(zip(specs, rewards, strict=True))):
            buffer.record_end(spec, make_episode_header(spec, reward=reward))
    assert seen == [None, pytest.approx(0.75, abs=0.01)], "newer rewards weigh more"


def test_a_function_of_an_installed_package_goes_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described = tmp_path / "mine-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n", encoding="utf-8")
    (described / "entry_points.txt").write_text(
        "[agentrl.losses]\nof_mine = functions_of_mine:sapo\n[agentrl.advantages]\nwrong = functions_of_mine:sapo\n",
        encoding="utf-8",
    )
    (tmp_path / "functions_of_mine.py").write_text(Path(SCRIPT).read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = run_config(tmp_path, loss={"name": "of_mine", "scale": 2.0})
    code, function = find_function("loss", config.trainer.loss.name, key="trainer.loss.name")
    assert code.reference == f"{tmp_path / 'functions_of_mine.py'}:sapo", "a package that is no wheel is shipped"
    assert function.__name__ == "sapo"
    assert code.digest == find_function_code("loss", f"{SCRIPT}:sapo", key="trainer.loss.name").digest
    with pytest.raises(ConfigError, match=r"@agentrl\.advantage"):
        find_function_code("advantage", "wrong", key="credit.advantage")
    with pytest.raises(ValueError, match="of_mine"):
        run_config(tmp_path, loss={"name": "of_nobody"})


def per_turn(advantages: Any) -> AdvantageEstimator:
    def function(group: Group) -> Any:
        return advantages

    return AdvantageEstimator(name="mine", function=function, mark=FunctionDeclaration("advantage"), options={})


@pytest.mark.parametrize("turns", [[1.0, 2.0], [1.0, 2.0, 3.0, 4.0], [1.0, True, 2.0], [1.0, math.nan, 2.0]])
def test_an_advantage_per_turn_is_one_number_per_turn(turns: list[float]) -> None:
    group = Group(rewards=(1.0, 0.0), episodes=("e0", "e1"), turn_states=((b"a",) * 3, (b"b",) * 3))
    assert per_turn([[1.0, 2.0, 3.0], -1.0])(group)[0].by_turn == (1.0, 2.0, 3.0)
    with pytest.raises(InputError, match=r"a reward of 0\.0 and 3 turns"):
        per_turn([[1.0, 2.0, 3.0], turns])(group)


@pytest.mark.parametrize(
    "advantages",
    [
        np.array([1.0, -1.0]),
        [np.float32(1.0), np.int64(-1)],
        [np.array([1.0, 0.5], np.float32), np.array([-1.0, 0.5])],
        [[np.float32(1.0), np.float64(0.5)], (np.int64(-1), 0.5)],
        torch.tensor([1.0, -1.0]),
    ],
)
def test_advantages_may_be_numbers_of_numpy(advantages: Any) -> None:
    group = Group(rewards=(1.0, 0.0), episodes=("e0", "e1"), turn_states=((b"a",) * 2, (b"b",) * 2))
    assert [credit.value for credit in per_turn(advantages)(group)] == [1.0, -1.0]


def test_an_estimator_over_a_step_sees_the_ids_of_the_journal() -> None:
    seen: list[tuple[str, ...]] = []

    def function(group: Group) -> list[float]:
        seen.append(group.groups)
        return [0.0 for _ in group.rewards]

    mark = FunctionDeclaration("advantage", over="step")
    estimator = AdvantageEstimator(name="mine", function=function, mark=mark, options={})
    names = ["e0", "e5", "e17", "e17~0.r#8.b1", "e4~0.r#3.1"]
    credit = TrajectoryCredit("seat", 0, 1.0, 0.0, 0.0)
    units = [
        Unit(episode_id=name, attempt=0, policy="p", location=EpisodeDataLocation("x", 0), credits=(credit,))
        for name in names
    ]
    OptimizerStepCreditAssigner(estimator, group_size=4).credited("p", [("env", unit) for unit in units])
    assert seen == [("g0", "g4", "g16", "g16", "e4~0.r#3")]
