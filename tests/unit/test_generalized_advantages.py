"""`credit.advantage = "gae"`: the formula, the value head, and that the policy's gradient is that of its own loss."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from agentrl.config.run import RunConfig
from agentrl.config.sections import CreditConfig
from agentrl.core.errors import ConfigError
from agentrl.core.records import EpisodeDataLocation, PolicyVersion, TrainBatch, Trajectory, TrajectoryCredit, Unit
from agentrl.core.tokens import ExpertRouting, TrainingSample
from agentrl.credit.advantages.gae import generalized_advantages
from agentrl.learn.learner import Learner
from agentrl.learn.packing import pack
from agentrl.learn.trainer import PolicyTrainer
from tests.learn_cases import make_rows, read_step_file, run_config, write_model

GAE = {"name": "gae", "discount": 0.97, "trace_decay": 0.8}
EPISODES = 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


# --- the formula ------------------------------------------------------------------------------------------------------


@st.composite
def conversations(draw: st.DrawFn) -> list[list[tuple[int, float]]]:
    """Draw some agents, each as the number of tokens and the reward of each turn."""
    turn = st.tuples(st.integers(1, 4), st.floats(-2, 2))
    return draw(st.lists(st.lists(turn, min_size=1, max_size=4), max_size=4))


@given(conversations(), st.floats(0, 1), st.floats(0, 1), st.randoms(use_true_random=False))
def test_advantages_are_those_of_a_loop(
    agents: list[list[tuple[int, float]]], discount: float, trace_decay: float, random: Any
) -> None:
    """Each token's sum of (γλ)^k δ, over the tokens of its agent alone; turns come in any order, as rows do."""
    blocks = [(agent, turn) for agent, turns in enumerate(agents) for turn in range(len(turns))]
    random.shuffle(blocks)
    tokens = [(agent, turn, at) for agent, turn in blocks for at in range(agents[agent][turn][0])]
    values = [random.uniform(-2, 2) for _ in tokens]
    to_go = [math.fsum(reward for _, reward in agents[agent][turn:]) for agent, turn, _ in tokens]
    owner, turns = [agent for agent, _, _ in tokens], [turn for _, turn, _ in tokens]

    found = generalized_advantages(to_go, values, owner, turns, discount=discount, trace_decay=trace_decay)
    unbiased = generalized_advantages(to_go, values, owner, turns, discount=discount, trace_decay=1.0)

    for agent, given_turns in enumerate(agents):
        places = sorted((at for at in range(len(tokens)) if owner[at] == agent), key=lambda at: tokens[at])
        rewards = [given_turns[tokens[at][1]][1] if _is_last(tokens[at], given_turns) else 0.0 for at in places]
        known = [values[at] for at in places] + [0.0]
        deltas = [reward + discount * known[t + 1] - known[t] for t, reward in enumerate(rewards)]
        for t, at in enumerate(places):
            wanted = sum((discount * trace_decay) ** k * delta for k, delta in enumerate(deltas[t:]))
            earned = sum(discount**k * reward for k, reward in enumerate(rewards[t:]))
            assert found.advantages[at] == pytest.approx(wanted, abs=1e-9)
            assert found.returns[at] == pytest.approx(earned, abs=1e-9)
            assert unbiased.advantages[at] == pytest.approx(earned - values[at], abs=1e-9)


def _is_last(token: tuple[int, int, int], turns: Sequence[tuple[int, float]]) -> bool:
    _, turn, at = token
    return at == turns[turn][0] - 1


# --- the trainer ------------------------------------------------------------------------------------------------------


class Conversations:
    """Episodes of two agents: one with a row of two turns, one with two rows of two turns, with rewards to go."""

    def __init__(self) -> None:
        rows = [
            row.with_column("turn_index", np.where(row.loss_mask, np.cumsum(row.loss_mask) > 2, -1).astype(np.int32))
            for row in make_rows(0, 3 * EPISODES)
        ]
        self.trajectories = []
        for number in range(EPISODES):
            first, second, third = rows[3 * number : 3 * number + 3]
            third_turns = np.where(third.loss_mask, third.turn_index + 2, -1).astype(np.int32)
            third = third.with_column("turn_index", third_turns)
            self.trajectories.append(
                (
                    Trajectory(seat="agent", index=0, policy="policy", rows=(first,), reward=0.0),
                    Trajectory(seat="agent", index=1, policy="policy", rows=(second, third), reward=0.0),
                )
            )
        draws = np.random.default_rng(1).normal(size=(EPISODES, 2, 4)).astype(np.float32)
        self.returns = [[tuple(map(float, agent)) for agent in episode] for episode in draws]

    def read(self, units: Sequence[Unit]) -> list[tuple[Trajectory, ...]]:
        return [self.trajectories[int(unit.episode_id[1:])] for unit in units]

    def batch(self, step_id: int = 1) -> TrainBatch:
        units = tuple(
            Unit(
                episode_id=f"e{number}",
                attempt=0,
                policy="policy",
                location=EpisodeDataLocation("nowhere", 0),
                credits=tuple(
                    TrajectoryCredit("agent", index, own[0], own[0], 0.0, own) for index, own in enumerate(agents)
                ),
            )
            for number, agents in enumerate(self.returns)
        )
        return TrainBatch(step_id=step_id, policy="policy", units=units, normalizer=40.0)


CONVERSATIONS = Conversations()


class Replaced(PolicyTrainer):
    """Trains on advantages that are given by hand, by (episode, row, position)."""

    by_hand: dict[tuple[str, int, int], float]

    def _read_share(self, learner: Learner, units: Sequence[Unit]) -> tuple[list[TrainingSample], int] | None:
        found = super()._read_share(learner, units)
        assert found is not None
        samples, num_stale = found
        replaced = [
            msgspec.structs.replace(
                sample,
                advantages=np.array(
                    [
                        self.by_hand.get((sample.episode_id, sample.row_index, at), 0.0)
                        for at in range(len(sample.token_ids))
                    ],
                    np.float32,
                ),
            )
            for sample in samples
        ]
        return replaced, num_stale


def config_of(model: Path, advantage: Any = GAE, **trainer: Any) -> RunConfig:
    credit = CreditConfig(group_size=1, advantage=advantage)
    return run_config(model, **trainer).model_copy(update={"credit": credit})


def started(config: RunConfig, place: Path, *, resume: Path | None = None) -> PolicyTrainer:
    trainer = PolicyTrainer(config.trainer_plan, place, read=CONVERSATIONS.read)
    trainer.start(resume)
    if resume is None and (head := trainer._learner("policy").value_head) is not None:
        with torch.no_grad():  # else all values of the first step are 0
            head.weight.copy_(torch.linspace(-3, 4, len(head.weight)))
            head.bias.fill_(0.3)
    return trainer


def taken(trainer: PolicyTrainer, step: int) -> dict[str, float]:
    """The metrics of a step, whose version is published."""
    trainer.forward_backward(CONVERSATIONS.batch(step))
    report = trainer.optim_step("policy", step)
    trainer.publish("policy", PolicyVersion("policy", 0, step))
    return {**report.metrics, "loss": report.loss, "grad_norm": report.grad_norm}


def gradients(trainer: PolicyTrainer) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of the policy and of its value head in the open step."""
    learner = trainer._learner("policy")
    own, head = learner.gradients(), learner.value_gradients()
    return torch.cat([each.flatten() for each in own]), torch.cat([each.flatten() for each in head])


def by_hand(
    model: Path, *, cut: Collection[int] = ()
) -> tuple[dict[tuple[str, int, int], tuple[float, float, float]], torch.Tensor]:
    """Advantage, return and value of each trained token, from one row at a time in float64; and the gradient of the
    value head. Episodes that are `cut` go on with the value behind their last token."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    weight, found, total = torch.linspace(-3, 4, 32, dtype=torch.float64), {}, torch.zeros(33, dtype=torch.float64)
    for number, trajectories in enumerate(CONVERSATIONS.trajectories):
        row_index = 0
        for trajectory, to_go in zip(trajectories, CONVERSATIONS.returns[number], strict=True):
            tokens = []
            for row in trajectory.rows:
                with torch.no_grad():
                    hidden = network.model(torch.from_numpy(row.token_ids).long()[None]).last_hidden_state[0]
                for at in np.flatnonzero(row.loss_mask).tolist():
                    before = hidden[at - 1]
                    value = float(before @ weight) / 32 + 0.3
                    tokens.append(((f"e{number}", row_index, at), int(row.turn_index[at]), value, before))
                row_index += 1
            later, advantage = 0.0, 0.0
            if number in cut:
                later = float(hidden[-1] @ weight) / 32 + 0.3
            earned = later
            for place in reversed(range(len(tokens))):
                key, turn, value, before = tokens[place]
                reward = 0.0
                if place == len(tokens) - 1:
                    reward = to_go[turn]
                elif tokens[place + 1][1] != turn:
                    reward = to_go[turn] - to_go[tokens[place + 1][1]]
                advantage = reward + 0.97 * later - value + 0.97 * 0.8 * advantage
                earned = reward + 0.97 * earned
                later = value
                found[key] = (advantage, earned, value)
                total -= advantage / 40.0 * torch.cat([before / 32, torch.ones(1, dtype=torch.float64)])
    return found, total.float()


@pytest.mark.parametrize(
    "loss", [{"name": "truncated"}, {"name": "gspo", "clip_low": 0.5, "clip_high": 0.5}, {"name": "ppo", "kl": 0.1}]
)
def test_the_policy_gets_the_gradient_of_its_own_loss(model: Path, tmp_path: Path, loss: dict[str, Any]) -> None:
    """The same as with the advantages given by hand; and the value head that of 0.5 (V - target)², nothing else."""
    from agentrl.config.policies import LoraConfig, PolicyConfig

    policies: Any = {"policy": PolicyConfig(learning_rate=1e-2)}
    if "kl" in loss:
        policies = {"policy": PolicyConfig(learning_rate=1e-2, lora=LoraConfig(rank=4, alpha=8.0))}
    expected, of_head = by_hand(model)
    trainer = started(config_of(model, loss=loss, policies=policies), tmp_path / "gae")
    other = Replaced(
        config_of(model, "none", loss=loss, policies=policies).trainer_plan, tmp_path / "hand", read=CONVERSATIONS.read
    )
    other.by_hand = {key: advantage for key, (advantage, _, _) in expected.items()}
    other.start()
    for each in (trainer, other):
        each.forward_backward(CONVERSATIONS.batch())
    own, head = gradients(trainer)
    wanted = torch.cat([each.flatten() for each in other._learner("policy").gradients()])
    assert float((own - wanted).norm()) < 1e-5 * float(wanted.norm())
    assert float((head - of_head).norm()) < 1e-5 * float(of_head.norm())
    report, hand = (each.optim_step("policy", 1) for each in (trainer, other))
    assert (report.loss, report.grad_norm) == pytest.approx((hand.loss, hand.grad_norm), rel=1e-5)

    advantages, returns, values = np.array(list(expected.values())).T
    assert report.metrics["value/loss"] == pytest.approx(0.5 * (advantages**2).sum() / 40.0, rel=1e-5)
    explained = 1.0 - (returns - values).var() / returns.var()
    assert report.metrics["value/explained_variance"] == pytest.approx(explained, rel=1e-4)
    rows, columns = read_step_file(tmp_path / "gae" / str(report.columns))
    keys = [(*row, int(columns["position"][at])) for row, a, b in _ranges(rows, columns) for at in range(a, b)]
    assert sorted(keys) == sorted(expected)
    assert columns["advantages"].tolist() == pytest.approx([expected[key][0] for key in keys], abs=1e-5)


@pytest.mark.parametrize("micro_batch_tokens", [8192, 24])
@pytest.mark.parametrize("bootstrap", [True, False])
def test_an_episode_that_a_limit_cut_goes_on_with_the_value_of_its_last_state(
    model: Path, tmp_path: Path, bootstrap: bool, micro_batch_tokens: int
) -> None:
    """If the option says so; the other episodes end with their last token."""
    cut = (1, 3)
    batch = CONVERSATIONS.batch()
    units = [replace(unit, is_cut=number in cut) for number, unit in enumerate(batch.units)]
    trainer = started(
        config_of(model, {**GAE, "bootstrap": bootstrap}, micro_batch_tokens=micro_batch_tokens), tmp_path
    )
    trainer.forward_backward(replace(batch, units=tuple(units)))
    expected, of_head = by_hand(model, cut=cut if bootstrap else ())
    _, head = gradients(trainer)
    assert float((head - of_head).norm()) < 1e-5 * float(of_head.norm())
    rows, columns = read_step_file(tmp_path / str(trainer.optim_step("policy", 1).columns))
    keys = [(*row, int(columns["position"][at])) for row, a, b in _ranges(rows, columns) for at in range(a, b)]
    assert columns["advantages"].tolist() == pytest.approx([expected[key][0] for key in keys], abs=1e-5)
    uncut, _ = by_hand(model)
    moved = {key[0] for key in keys if abs(expected[key][0] - uncut[key][0]) > 1e-3}
    assert moved == ({f"e{number}" for number in cut} if bootstrap else set())


@pytest.mark.parametrize("micro_batch_tokens", [8192, 24])
def test_further_updates_of_the_values_follow_the_gradient_over_all_tokens(
    model: Path, tmp_path: Path, micro_batch_tokens: int
) -> None:
    advantage = {**GAE, "value_updates": 4}
    trainer = started(config_of(model, advantage, micro_batch_tokens=micro_batch_tokens), tmp_path)
    head = trainer._learner("policy").value_head
    assert head is not None
    parameters = [parameter.detach().clone().requires_grad_() for parameter in (head.weight, head.bias)]
    inputs, targets = inputs_and_targets(model)
    optimizer = torch.optim.AdamW(parameters, lr=0.03, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(4):
        optimizer.zero_grad()
        weight, bias = parameters
        (0.5 * (inputs @ weight + bias - targets) ** 2 / 40.0).sum().backward()
        optimizer.step()
    taken(trainer, 1)
    assert not head.curvature.any()  # type: ignore[union-attr]
    torch.testing.assert_close(head.weight.detach(), parameters[0].detach(), atol=2e-5, rtol=0)
    torch.testing.assert_close(head.bias.detach(), parameters[1].detach(), atol=2e-5, rtol=0)


def inputs_and_targets(model: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """The inputs of the value head at all trained tokens, and what it should learn there."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    expected, _ = by_hand(model)
    inputs, targets = [], []
    for number, trajectories in enumerate(CONVERSATIONS.trajectories):
        rows = [row for trajectory in trajectories for row in trajectory.rows]
        for row_index, row in enumerate(rows):
            with torch.no_grad():
                hidden = network.model(torch.from_numpy(row.token_ids).long()[None]).last_hidden_state[0]
            for at in np.flatnonzero(row.loss_mask).tolist():
                advantage, _, value = expected[f"e{number}", row_index, at]
                inputs.append(hidden[at - 1] / 32)
                targets.append(advantage + value)
    return torch.stack(inputs), torch.tensor(targets)


def _ranges(rows: list[list[Any]], columns: dict[str, Any]) -> list[tuple[list[Any], int, int]]:
    offsets = columns["offsets"].tolist()
    return list(zip(rows, offsets[:-1], offsets[1:], strict=True))


def test_micro_batches_and_batches_of_a_step_change_nothing(model: Path, tmp_path: Path) -> None:
    """One micro-batch, many, and units that come in two calls."""
    found = []
    for tokens, parts in ((8192, (EPISODES,)), (24, (EPISODES,)), (8192, (2, EPISODES))):
        trainer = started(config_of(model, micro_batch_tokens=tokens), tmp_path / f"{tokens} {len(parts)}")
        batch = CONVERSATIONS.batch()
        for part in parts:
            trainer.forward_backward(replace(batch, units=batch.units[:part]))
        found.append((gradients(trainer), trainer.optim_step("policy", 1)))
    (whole, report), *others = found
    for split, other in others:
        for one, two in zip(split, whole, strict=True):
            assert float((one - two).norm()) < 1e-5 * float(two.norm())
        for name in ("value/loss", "value/explained_variance", "advantage/zero_share"):
            assert other.metrics[name] == pytest.approx(report.metrics[name], rel=1e-4)


def test_values_learn_the_returns(model: Path, tmp_path: Path) -> None:
    """The same conversations again and again, by a policy that does not move: what is left to explain shrinks."""
    from agentrl.config.policies import PolicyConfig

    policies: Any = {"policy": PolicyConfig(learning_rate=1e-12)}
    advantage = {"name": "gae", "trace_decay": 1.0, "value_learning_rate": 0.3}
    trainer = PolicyTrainer(
        config_of(model, advantage, policies=policies).trainer_plan, tmp_path, read=CONVERSATIONS.read
    )
    trainer.start()
    found = [taken(trainer, step) for step in range(1, 60)]
    assert found[0]["value/explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert found[-1]["value/explained_variance"] > 0.3
    assert found[-1]["value/loss"] < 0.75 * found[0]["value/loss"]


def test_rewards_of_zero_teach_once_values_expect_more(model: Path, tmp_path: Path) -> None:
    """The share of units without advantage is that of the trainer's advantages, not of the rewards."""
    batch = CONVERSATIONS.batch()
    nothing = tuple(
        replace(unit, credits=tuple(TrajectoryCredit("agent", index, 0.0, 0.0, 0.0) for index in range(2)))
        for unit in batch.units
    )
    shares, norms = [], []
    for values in (True, False):
        trainer = started(config_of(model), tmp_path / str(values))
        if not values:
            for parameter in trainer._learner("policy").value_parameters.values():
                parameter.data.zero_()
        trainer.forward_backward(replace(batch, units=nothing))
        report = trainer.optim_step("policy", 1)
        shares.append(report.metrics["advantage/zero_share"])
        norms.append(report.grad_norm)
        assert "value/explained_variance" not in report.metrics, "all returns are equal"
    assert shares == [0.0, 1.0]
    assert norms[0] > norms[1] == 0.0


def test_values_learn_where_the_policy_has_no_gradient(model: Path, tmp_path: Path) -> None:
    """And the policy where the values have none."""
    trainer = started(config_of(model), tmp_path)
    taken(trainer, 1)
    learner = trainer._learner("policy")
    parameters = [learner.model.parameters, learner.value_parameters]
    for moving in (0, 1):
        before = [{name: each.detach().clone() for name, each in own.items()} for own in parameters]
        for number, own in enumerate(parameters):
            for each in own.values():
                each.grad = torch.full_like(each, float(number == moving))
        learner.apply(1e-2, float(moving == 0))
        moved = [
            any(bool((each != was[name]).any()) for name, each in own.items())
            for own, was in zip(parameters, before, strict=True)
        ]
        assert moved == [moving == 0, moving == 1]


def test_the_step_after_a_resume_is_bit_identical(model: Path, tmp_path: Path) -> None:
    trainer = started(config_of(model), tmp_path / "first")
    for step in (1, 2):
        taken(trainer, step)
    trainer.save(tmp_path / "checkpoint")
    assert not list((tmp_path / "first/versions").rglob("*value*")), "no engine reads the head"
    resumed = started(config_of(model), tmp_path / "second", resume=tmp_path / "checkpoint")
    metrics = [taken(each, 3) for each in (trainer, resumed)]
    assert metrics[0] == metrics[1]
    states = []
    for each in (trainer, resumed):
        learner = each._learner("policy")
        parameters = (*learner.model.parameters.values(), *learner.value_parameters.values())
        moments = (learner.value_optimizer.state[one] for one in learner.value_parameters.values())
        states.append([*parameters, *(tensor for state in moments for tensor in state.values())])
    assert all(torch.equal(one, two) for one, two in zip(*states, strict=True))
    assert len(states[0]) > 8
    assert any(bool(each.any()) for each in states[0][-6:])


def test_a_resume_may_change_to_gae_and_back(model: Path, tmp_path: Path) -> None:
    """A head begins at 0 where the checkpoint has none, and another advantage leaves it out."""
    trainer = started(config_of(model), tmp_path / "gae")
    taken(trainer, 1)
    trainer.save(tmp_path / "with")
    without = started(config_of(model, "none"), tmp_path / "none", resume=tmp_path / "with")
    assert "value/loss" not in taken(without, 2)
    without.save(tmp_path / "without")
    again = started(config_of(model), tmp_path / "again", resume=tmp_path / "without")
    assert not any(bool(each.any()) for each in again._learner("policy").value_parameters.values())
    assert taken(again, 3)["value/loss"] > 0


def test_a_step_is_computed_again_from_a_checkpoint(model: Path, tmp_path: Path) -> None:
    trainer = started(config_of(model), tmp_path / "run")
    taken(trainer, 1)
    trainer.save(tmp_path / "checkpoint")
    reports = [taken(trainer, step) for step in (2, 3)]
    again = PolicyTrainer(config_of(model).trainer_plan, tmp_path / "run", read=CONVERSATIONS.read, publishes=False)
    again.start()
    assert again.only_in_checkpoints("policy")
    between = [(CONVERSATIONS.batch(2), reports[0]["learning_rate"])]
    start, saved = PolicyVersion("policy", 0, 1), tmp_path / "checkpoint" / "policy"
    assert again.recompute(CONVERSATIONS.batch(3), start, saved, between) == (
        reports[1]["loss"],
        reports[1]["grad_norm"],
    )


# --- refusals ---------------------------------------------------------------------------------------------------------

BASE = {
    "environment": {"id": "calculator"},
    "model": {"path": "agentrl.environments:calculator/model"},
    "policies": {"solver": {}},
    "credit": {"group_size": 1, "advantage": GAE},
}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"credit": {"advantage": {"name": "gae", "discount": 1.5}}}, "gae, discount"),
        ({"credit": {"advantage": {"name": "gae", "trace_decay": -0.1}}}, "gae, trace_decay"),
        ({"credit": {"advantage": {"name": "gae", "value_learning_rate": 0}}}, "value_learning_rate"),
        (
            {"credit": {"advantage": {"name": "gae", "lambda": 0.9}}},
            "options: discount, trace_decay",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(change: dict[str, Any], reason: str) -> None:
    RunConfig.model_validate(BASE)
    with pytest.raises(ValueError, match=reason):
        RunConfig.model_validate(BASE | change)


def test_each_episode_can_be_released_alone() -> None:
    credit = {"group_size": 4, "advantage": GAE, "release": "episode"}
    RunConfig.model_validate(BASE | {"credit": credit, "trainer": {"loss": {"normalizer": 64}}})


def test_a_dry_run_refuses_what_a_start_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from agentrl.cli.main import main

    file = tmp_path / "run.toml"
    file.write_text(
        'environment.id = "calculator"\nmodel.path = "agentrl.environments:calculator/model"\npolicies.solver = {}\n'
        'credit = { group_size = 1, advantage = { name = "gae", discount = 2.0 } }\n'
    )
    assert main(["train", str(file), "--dry-run"]) == ConfigError.exit_code
    assert "discount" in capsys.readouterr().err


def test_the_last_token_of_a_cut_row_has_no_recorded_experts() -> None:
    """The engine never computed it: nothing was predicted from it."""
    row = make_rows(0, 1)[0]
    routing = np.zeros((len(row.token_ids) - 1, 2, 1), np.int16)
    sample = TrainingSample(
        token_ids=row.token_ids,
        loss_mask=row.loss_mask,
        logprobs=row.logprobs,
        advantages=np.zeros(len(row.token_ids), np.float32),
        experts=ExpertRouting(routing),
        is_cut=True,
    )
    (plain,) = pack([sample], max_tokens=64)
    (whole,) = pack([sample, msgspec.structs.replace(sample, is_cut=False)], max_tokens=128, ends=True)
    assert plain.end_index is None
    assert whole.end_index is not None
    assert whole.end_index.tolist() == [len(row.token_ids) - 1]
    assert whole.expert_routing is not None
    assert whole.unrouted_tokens == 1
    assert len(whole.token_ids) == len(row.token_ids), "the prefix is shared"
