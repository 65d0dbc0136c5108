"""The policy trainer: idempotent steps, refusals that change nothing, reports, versions and checkpoints."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from agentrl.config.policies import FrozenPolicy, LoraConfig, PolicyConfig
from agentrl.config.run import RunConfig
from agentrl.config.sections import OptimizerConfig
from agentrl.core.errors import (
    ConfigError,
    EngineError,
    EntriesError,
    ModelError,
    NonFiniteError,
    TrainerError,
    UntrainableUnitsError,
)
from agentrl.core.ports import Trainer
from agentrl.core.records import PolicyVersion, TrainBatch, Trajectory, Unit, VersionSpan
from agentrl.core.tokens import KeptSets, TrajectoryRow
from agentrl.engines.weights.reading import read_metadata, read_weights
from agentrl.learn.trainer import InProcessTrainer, PolicyTrainer
from tests.learn_cases import (
    LORA,
    VOCABULARY,
    Episodes,
    divisors,
    make_rows,
    read_step_file,
    run_config,
    write_model,
    write_tokenizer,
)

START = PolicyVersion("policy", 0, 0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_model(tmp_path_factory.mktemp("model"))
    write_tokenizer(path)
    return path


@pytest.fixture
def episodes() -> Episodes:
    return Episodes(make_rows(0, 8))


def started(config: RunConfig, directory: Path, episodes: Episodes, *, resume: Path | None = None) -> PolicyTrainer:
    trainer = PolicyTrainer(config.trainer_plan, directory, read=episodes.read)
    trainer.start(resume)
    return trainer


def weights(
    trainer: PolicyTrainer, directory: Path, policy: str = "policy", *, step: int = 0
) -> dict[str, torch.Tensor]:
    """The policy's weights, by way of a published version of a lineage nobody else uses."""
    lineage = 100 + len(list(directory.glob(f"versions/{policy}/*")))
    path = Path(trainer.publish(policy, PolicyVersion(policy, lineage, step)).path)
    return load_file(next(path.glob("*.safetensors")))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_units_that_cannot_be_trained_are_named_and_the_others_are_trained(
    model: Path, tmp_path: Path, episodes: Episodes
) -> None:
    def read(units: Sequence[Unit]) -> Sequence[Sequence[Trajectory]]:
        for unit in units:
            if unit.episode_id in ("e2", "e5"):
                raise EntriesError(f"{unit.episode_id} was sampled at another temperature than its row")
        return episodes.read(units)

    trainer = PolicyTrainer(run_config(model).trainer_plan, tmp_path, read=read)
    trainer.start()
    with pytest.raises(UntrainableUnitsError) as caught:
        trainer.forward_backward(episodes.batch())
    assert [(episode, attempt) for episode, attempt, _ in caught.value.units] == [("e2", 0), ("e5", 0)]
    (tmp_path / "checkpoint").mkdir()
    trainer.save(tmp_path / "checkpoint")  # no step is in progress
    batch = episodes.batch()
    left = tuple(unit for unit in batch.units if unit.episode_id not in ("e2", "e5"))
    trainer.forward_backward(replace(batch, units=left))
    assert trainer.optim_step("policy", 1).samples == 6


@pytest.mark.parametrize("lora", [None, LORA])
def test_a_step_changes_the_weights_once(
    model: Path, tmp_path: Path, episodes: Episodes, lora: LoraConfig | None
) -> None:
    trainer = started(run_config(model, policies={"policy": PolicyConfig(lora=lora)}), tmp_path, episodes)
    before = weights(trainer, tmp_path)
    trainer.forward_backward(episodes.batch())
    report = trainer.optim_step("policy", 1)
    after = weights(trainer, tmp_path, step=1)
    assert not same(before, after)
    assert trainer.optim_step("policy", 1) is report
    trainer.forward_backward(episodes.batch())
    assert trainer.optim_step("policy", 1) is report
    assert same(weights(trainer, tmp_path, step=1), after)
    assert report.samples == 8
    assert report.tokens == sum(int(t.rows[0].loss_mask.sum()) for t in episodes.trajectories)
    assert report.grad_norm > 0


def test_a_batch_given_twice_counts_once(model: Path, tmp_path: Path, episodes: Episodes) -> None:
    reports = []
    for times in (1, 2):
        trainer = started(run_config(model), tmp_path / str(times), episodes)
        for _ in range(times):
            trainer.forward_backward(episodes.batch())
        reports.append(trainer.optim_step("policy", 1))
    assert reports[0].grad_norm == reports[1].grad_norm
    assert reports[0].input_digest == reports[1].input_digest


def test_two_batches_of_a_step_add_up_to_one(model: Path, tmp_path: Path, episodes: Episodes) -> None:
    whole = started(run_config(model), tmp_path / "whole", episodes)
    whole.forward_backward(episodes.batch())
    parts = started(run_config(model), tmp_path / "parts", episodes)
    units, normalizer = episodes.units(), episodes.batch().normalizer
    for piece in (units[:3], units[3:]):
        parts.forward_backward(TrainBatch(step_id=1, policy="policy", units=piece, normalizer=normalizer))
    one, two = whole.optim_step("policy", 1), parts.optim_step("policy", 1)
    assert two.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
    assert two.loss == pytest.approx(one.loss, rel=1e-5)
    assert two.input_digest == one.input_digest


def test_tokens_beyond_max_lag_are_context_and_counted(model: Path, tmp_path: Path) -> None:
    """The second step, of tokens from before the first, once masked by their age and once by hand."""

    def spans(row: TrajectoryRow, cut: int) -> tuple[VersionSpan, ...]:
        ends = ((0, cut, 0), (cut, len(row), 1))
        return tuple(VersionSpan(start, stop, START._replace(step=step)) for start, stop, step in ends)

    rows = make_rows(0, 8)
    cuts = [len(row) if number == 3 else len(row) // 2 for number, row in enumerate(rows)]
    aged = [
        row.with_column("spans", spans(row, cut)[: 1 if cut == len(row) else 2])
        for row, cut in zip(rows, cuts, strict=True)
    ]
    masked = [
        row.with_column("loss_mask", row.loss_mask & (np.arange(len(row)) >= cut))
        for row, cut in zip(aged, cuts, strict=True)
    ]
    reports = []
    for name, second, policy in (
        ("by age", aged, {"max_staleness": 0, "max_lag": 0}),
        ("by hand", masked, {}),
    ):
        episodes = Episodes([*make_rows(1, 8), *second])
        trainer = started(run_config(model, policies={"policy": PolicyConfig(**policy)}), tmp_path / name, episodes)
        units = episodes.units()
        trainer.forward_backward(TrainBatch(step_id=1, policy="policy", units=units[:8], normalizer=64.0))
        assert trainer.optim_step("policy", 1).metrics.get("staleness/masked") == (0.0 if policy else None)
        trainer.forward_backward(TrainBatch(step_id=2, policy="policy", units=units[8:], normalizer=64.0))
        reports.append(trainer.optim_step("policy", 2))
    by_age, by_hand = reports
    assert by_age.grad_norm == by_hand.grad_norm > 0
    assert (by_age.samples, by_age.tokens) == (7, by_hand.tokens)
    sampled = sum(int(row.loss_mask.sum()) for row in rows)
    assert by_age.metrics["staleness/masked"] == pytest.approx(1 - by_age.tokens / sampled)


def test_a_step_of_nothing_leaves_weights_and_optimizer_as_they_are(
    model: Path, tmp_path: Path, episodes: Episodes
) -> None:
    trainer = started(run_config(model), tmp_path / "one", episodes)
    trainer.forward_backward(episodes.batch())
    trainer.optim_step("policy", 1)  # from now on there is momentum
    before = weights(trainer, tmp_path / "one", step=1)
    trainer.forward_backward(TrainBatch(step_id=2, policy="policy", units=(), normalizer=1.0))
    report = trainer.optim_step("policy", 2)
    assert (report.samples, report.tokens, report.grad_norm) == (0, 0, 0.0)
    assert same(weights(trainer, tmp_path / "one", step=2), before)
    trainer.forward_backward(episodes.batch(3))
    trainer.optim_step("policy", 3)
    assert not same(weights(trainer, tmp_path / "one", step=3), before)


@pytest.mark.parametrize("step_id", [0, 2])
def test_a_step_out_of_order_is_refused(model: Path, tmp_path: Path, episodes: Episodes, step_id: int) -> None:
    trainer = started(run_config(model), tmp_path, episodes)
    with pytest.raises(TrainerError):
        trainer.optim_step("policy", step_id)
    if step_id == 2:
        with pytest.raises(TrainerError, match="step 0"):
            trainer.forward_backward(episodes.batch(step_id=2))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_skips_the_step(
    model: Path, tmp_path: Path, episodes: Episodes, value: float
) -> None:
    trainer = started(run_config(model), tmp_path, episodes)
    trainer.forward_backward(episodes.batch())
    trainer.optim_step("policy", 1)
    before = weights(trainer, tmp_path, step=1)
    good = episodes.advantages.copy()
    episodes.advantages[5] = value
    trainer.forward_backward(episodes.batch(2))
    with pytest.raises(NonFiniteError, match="episode e5"):
        trainer.optim_step("policy", 2)
    assert same(weights(trainer, tmp_path, step=1), before)
    episodes.advantages[:] = good
    trainer.forward_backward(episodes.batch(2))
    undisturbed = started(run_config(model), tmp_path / "undisturbed", episodes)
    for step in (1, 2):
        undisturbed.forward_backward(episodes.batch(step))
        report = undisturbed.optim_step("policy", step)
    assert trainer.optim_step("policy", 2).grad_norm == report.grad_norm
    assert same(weights(trainer, tmp_path, step=2), weights(undisturbed, tmp_path / "undisturbed", step=2))


def test_rows_without_advantage_are_consumed_but_not_forwarded(model: Path, tmp_path: Path, episodes: Episodes) -> None:
    everything = started(run_config(model), tmp_path / "all", episodes)
    episodes.advantages[2:6] = 0.0
    everything.forward_backward(episodes.batch())
    report = everything.optim_step("policy", 1)
    assert (report.samples, report.metrics["skipped_samples"]) == (8, 4)
    lengths = [int(trajectory.rows[0].loss_mask.sum()) for trajectory in episodes.trajectories]
    assert report.metrics["measured_share"] == pytest.approx(1 - sum(lengths[2:6]) / sum(lengths))
    # A bonus too small to matter makes every row count again.
    with_bonus = started(run_config(model, entropy_bonus=1e-30), tmp_path / "bonus", episodes)
    with_bonus.forward_backward(episodes.batch())
    other = with_bonus.optim_step("policy", 1)
    assert (other.metrics["skipped_samples"], other.metrics["measured_share"]) == (0, 1)
    assert other.grad_norm == pytest.approx(report.grad_norm, rel=1e-5)


def test_a_step_without_any_advantage_still_counts(model: Path, tmp_path: Path, episodes: Episodes) -> None:
    trainer = started(run_config(model), tmp_path, episodes)
    before = weights(trainer, tmp_path)
    episodes.advantages[:] = 0.0
    trainer.forward_backward(episodes.batch())
    report = trainer.optim_step("policy", 1)
    assert (report.loss, report.grad_norm, report.samples) == (0.0, 0.0, 8)
    assert same(weights(trainer, tmp_path, step=1), before)


def test_the_entropy_bonus_raises_entropy(model: Path, tmp_path: Path, episodes: Episodes) -> None:
    episodes.advantages[:] = 0.0
    entropies = []
    policies = {"policy": PolicyConfig(learning_rate=1e-3)}
    trainer = started(run_config(model, policies=policies, entropy_bonus=1.0), tmp_path, episodes)
    for step in range(1, 4):
        trainer.forward_backward(episodes.batch(step))
        entropies.append(trainer.optim_step("policy", step).metrics["entropy"])
    assert entropies == sorted(entropies)
    assert entropies[0] < entropies[-1]


def test_step_columns_hold_what_the_loss_saw(model: Path, tmp_path: Path, episodes: Episodes) -> None:
    episodes.advantages[3] = 0.0
    trainer = started(run_config(model), tmp_path, episodes)
    trainer.publish("policy", PolicyVersion("policy", 4, 0))
    trainer.forward_backward(episodes.batch())
    report = trainer.optim_step("policy", 1)
    assert report.started_from == PolicyVersion("policy", 4, 0)
    assert report.columns == "steps/policy/4.1.safetensors"
    rows, columns = read_step_file(tmp_path / report.columns)
    assert rows == [[f"e{index}", 0] for index in range(8)]
    for index, trajectory in enumerate(episodes.trajectories):
        here = slice(int(columns["offsets"][index]), int(columns["offsets"][index + 1]))
        assert columns["position"][here].tolist() == np.flatnonzero(trajectory.rows[0].loss_mask).tolist()
        assert set(columns["advantages"][here]) == {np.float32(episodes.advantages[index])}
        logprobs = columns["trainer_logprobs"][here]
        assert np.isnan(logprobs).all() if index == 3 else (logprobs < 0).all()
        entropies = columns["entropy"][here]
        assert np.isnan(entropies).all() if index == 3 else ((entropies > 0) & (entropies < np.log(VOCABULARY))).all()


def test_two_adapters_on_one_base_do_not_touch_each_other(model: Path, tmp_path: Path, episodes: Episodes) -> None:
    alone = {"policy": PolicyConfig(lora=LORA)}
    together = {**alone, "other": PolicyConfig(lora=LORA), "full": PolicyConfig()}
    results = []
    for number, policies in enumerate((alone, together)):
        directory = tmp_path / str(number)
        trainer = started(run_config(model, policies=policies), directory, episodes)
        untouched = {name: weights(trainer, directory, name) for name in policies if name != "policy"}
        trainer.forward_backward(episodes.batch())
        trainer.optim_step("policy", 1)
        results.append(weights(trainer, directory, step=1))
        assert all(same(weights(trainer, directory, name), before) for name, before in untouched.items())
    assert same(*results)


def test_a_frozen_policy_takes_no_steps(model: Path, tmp_path: Path, episodes: Episodes) -> None:
    policies = {"policy": FrozenPolicy(kind="frozen"), "other": PolicyConfig(lora=LORA)}
    trainer = started(run_config(model, policies=policies), tmp_path, episodes)
    with pytest.raises(TrainerError, match="'policy'"):
        trainer.forward_backward(episodes.batch())


@pytest.mark.parametrize("kind", ["qwen3", "moe"])
def test_full_weights_load_with_from_pretrained(tmp_path: Path, episodes: Episodes, kind: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = write_model(tmp_path / "model", kind=kind)
    write_tokenizer(model)
    trainer = started(run_config(model), tmp_path, episodes)
    trainer.forward_backward(episodes.batch())
    trainer.optim_step("policy", 1)
    reference = trainer.publish("policy", PolicyVersion("policy", 0, 1))
    assert Path(reference.path) == tmp_path / "versions" / "policy" / "0.1"
    loaded = AutoModelForCausalLM.from_pretrained(reference.path)
    assert load_file(Path(reference.path) / "model.safetensors").keys() == load_file(model / "model.safetensors").keys()
    again = run_config(Path(reference.path))
    assert same(
        weights(started(again, tmp_path / "again", episodes), tmp_path / "again"), weights(trainer, tmp_path, step=1)
    )
    assert AutoTokenizer.from_pretrained(reference.path).chat_template
    assert torch.equal(loaded.lm_head.weight, loaded.model.embed_tokens.weight)


def test_an_adapter_loads_with_peft(model: Path, tmp_path: Path, episodes: Episodes) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    trainer = started(run_config(model, policies={"policy": PolicyConfig(lora=LORA)}), tmp_path, episodes)
    for step in (1, 2):
        trainer.forward_backward(episodes.batch(step))
        report = trainer.optim_step("policy", step)
    reference = trainer.publish("policy", PolicyVersion("policy", 0, 2))
    assert reference.kind == "adapter"
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), reference.path)
    trainer.forward_backward(episodes.batch(3))
    report = trainer.optim_step("policy", 3)
    assert report.columns is not None
    _, columns = read_step_file(tmp_path / report.columns)
    row = episodes.trajectories[1].rows[0]
    with torch.no_grad():
        logits = loaded(input_ids=torch.from_numpy(row.token_ids.astype(np.int64))[None]).logits[0, :-1]
    found = (logits / divisors(row)).log_softmax(-1)[np.flatnonzero(row.loss_mask) - 1]
    expected = columns["trainer_logprobs"][columns["offsets"][1] : columns["offsets"][2]]
    np.testing.assert_allclose(
        found.gather(1, torch.from_numpy(row.token_ids[row.loss_mask].astype(np.int64))[:, None])[:, 0].numpy(),
        expected,
        atol=1e-5,
    )


def test_a_version_is_never_overwritten(model: Path, tmp_path: Path, episodes: Episodes) -> None:
    trainer = started(run_config(model), tmp_path, episodes)
    first = trainer.publish("policy", START)
    assert trainer.publish("policy", START) == first
    with pytest.raises(TrainerError, match="step 0"):
        trainer.publish("policy", PolicyVersion("policy", 0, 1))
    other = Episodes(make_rows(0, 8), seed=9)
    again = started(run_config(model), tmp_path, other)
    trainer.forward_backward(episodes.batch())
    again.forward_backward(other.batch())
    trainer.optim_step("policy", 1)
    again.optim_step("policy", 1)
    trainer.publish("policy", PolicyVersion("policy", 0, 1))
    with pytest.raises(TrainerError, match="reused"):
        again.publish("policy", PolicyVersion("policy", 0, 1))
    assert not list((tmp_path / "versions" / "policy").glob(".*"))


@pytest.mark.parametrize("lora", [None, LORA])
def test_the_step_after_a_resume_is_bit_identical(
    model: Path, tmp_path: Path, episodes: Episodes, lora: LoraConfig | None
) -> None:
    config = run_config(model, policies={"policy": PolicyConfig(lora=lora)}, optimizer=OptimizerConfig(warmup_steps=5))
    trainer = started(config, tmp_path, episodes)
    trainer.publish("policy", START)
    for step in (1, 2):
        trainer.forward_backward(episodes.batch(step))
        report = trainer.optim_step("policy", step)
    trainer.save(tmp_path / "checkpoint")
    resumed = started(config, tmp_path / "second", episodes, resume=tmp_path / "checkpoint")
    assert resumed.optim_step("policy", 2) == report
    for each in (trainer, resumed):
        each.forward_backward(episodes.batch(3))
        each.optim_step("policy", 3)
    assert same(weights(trainer, tmp_path, step=3), weights(resumed, tmp_path / "second", step=3))


def test_the_learning_rate_rises_then_falls_to_its_share(model: Path, tmp_path: Path, episodes: Episodes) -> None:
    policies = {"policy": PolicyConfig(learning_rate=1e-3)}
    optimizer = OptimizerConfig(warmup_steps=2, final_learning_rate_share=0.2)
    config = run_config(model, policies=policies, optimizer=optimizer).model_copy(update={"steps": 6})
    trainer = started(config, tmp_path, episodes)
    rates = []
    for step in range(1, 8):
        trainer.forward_backward(episodes.batch(step))
        rates.append(trainer.optim_step("policy", step).metrics["learning_rate"])
    assert rates == pytest.approx([0.5e-3, 1e-3, 0.8e-3, 0.6e-3, 0.4e-3, 0.2e-3, 0.2e-3])


def test_a_checkpoint_of_other_weights_is_refused(model: Path, tmp_path: Path, episodes: Episodes) -> None:
    started(run_config(model), tmp_path, episodes).save(tmp_path / "checkpoint")
    config = run_config(model, policies={"policy": PolicyConfig(lora=LORA)})
    with pytest.raises(TrainerError, match="other weights"):
        started(config, tmp_path, episodes, resume=tmp_path / "checkpoint")
    with pytest.raises(TrainerError, match="read"):
        started(config, tmp_path, episodes, resume=tmp_path / "nowhere")


def test_a_token_whose_mask_is_missing_is_not_trained(model: Path, tmp_path: Path) -> None:
    rows = make_rows(0, 2)
    counts = np.where(rows[0].loss_mask, -1, 0).astype(np.int32)
    masked = rows[0].with_column("kept", KeptSets(counts=counts, ids=np.empty(0, np.int32)))
    episodes = Episodes([masked, rows[1]])
    trainer = started(run_config(model), tmp_path, episodes)
    trainer.forward_backward(episodes.batch())
    report = trainer.optim_step("policy", 1)
    assert (report.samples, report.tokens) == (1, int(rows[1].loss_mask.sum()))


def test_a_directory_without_a_model_is_refused(tmp_path: Path, episodes: Episodes) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        started(run_config(tmp_path), tmp_path, episodes)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        pytest.param("query_key_value", "is not a layer", id="a module the model lacks"),
        pytest.param("embed_tokens", "no adapter can be both trained and served", id="embeddings"),
        pytest.param("lm_head", "no adapter can be both trained and served", id="output projection"),
    ],
)
def test_an_adapter_on_what_cannot_have_one_is_refused(
    model: Path, tmp_path: Path, episodes: Episodes, target: str, reason: str
) -> None:
    lora = LoraConfig(target_modules=(target,))
    with pytest.raises(ConfigError, match=rf"'{target}' .*q_proj"):
        started(run_config(model, policies={"policy": PolicyConfig(lora=lora)}), tmp_path, episodes)


def test_the_port_runs_in_a_thread_and_the_loop_goes_on(model: Path, tmp_path: Path, episodes: Episodes) -> None:
    async def run() -> tuple[int, str]:
        trainer: Trainer = InProcessTrainer(run_config(model).trainer_plan, tmp_path, read=episodes.read)
        await trainer.start()
        reference = await trainer.publish("policy", START)
        computing = asyncio.ensure_future(trainer.forward_backward(episodes.batch()))
        turns = 0
        while not computing.done():
            turns += 1
            await asyncio.sleep(0)
        await computing
        report = await trainer.optim_step("policy", 1)
        await trainer.save(str(tmp_path / "checkpoint"))
        await trainer.close()
        await trainer.close()
        assert report.started_from == reference.version
        return turns, reference.sha256

    turns, sha256 = asyncio.run(run())
    assert turns > 1
    assert len(sha256) == 64
    assert (tmp_path / "checkpoint" / "policy" / "rng.json").is_file()


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "adapter"])
def test_only_versions_that_a_resume_loads_are_synced(
    model: Path, tmp_path: Path, episodes: Episodes, lora: LoraConfig | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = started(run_config(model, policies={"policy": PolicyConfig(lora=lora)}), tmp_path, episodes)
    trainer.publish("policy", START)  # also copies configuration and tokenizer, once
    synced: list[str] = []
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    trainer.forward_backward(episodes.batch())
    trainer.optim_step("policy", 1)
    weights = trainer.publish("policy", START._replace(step=1))
    assert Path(weights.path).is_dir()
    assert bool(synced) == (lora is not None), synced


def test_a_checkpoint_syncs_the_columns_of_the_steps_that_it_seals(
    model: Path, tmp_path: Path, episodes: Episodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = started(run_config(model), tmp_path, episodes)
    for step in (1, 2):
        trainer.forward_backward(episodes.batch(step))
        trainer.optim_step("policy", step)
    columns = sorted((tmp_path / "steps" / "policy").iterdir())
    columns[0].unlink()  # pruned
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    trainer.save(tmp_path / "checkpoint")
    assert {*map(str, (columns[1], tmp_path / "steps" / "policy", tmp_path / "steps"))} <= {*synced}
    assert len(columns) == 2
    synced.clear()
    trainer.save(tmp_path / "other")
    assert not any(path.startswith(str(tmp_path / "steps")) for path in synced)


def test_an_engine_in_this_process_needs_no_file_of_the_newest_weights(
    model: Path, tmp_path: Path, episodes: Episodes
) -> None:
    trainer = started(run_config(model), tmp_path, episodes)
    trainer.forward_backward(episodes.batch())
    trainer.optim_step("policy", 1)
    weights = trainer.publish("policy", START._replace(step=1))
    file = Path(weights.path) / "model.safetensors"
    expected = load_file(file)
    metadata = read_metadata(weights)
    file.unlink()
    taken = read_weights(weights, max_numbers=1 << 24)
    assert taken.metadata == metadata
    assert taken.tensors.keys() == expected.keys()
    assert all(torch.equal(taken.tensors[name], tensor) for name, tensor in expected.items())
    trainer.forward_backward(episodes.batch(2))
    assert read_weights(weights, max_numbers=1 << 24).tensors.keys() == expected.keys(), "nothing has changed yet"
    trainer.optim_step("policy", 2)
    with pytest.raises(EngineError, match="cannot be read"):
        read_weights(weights, max_numbers=1 << 24)
    assert all(torch.equal(taken.tensors[name], tensor) for name, tensor in expected.items()), "a copy"
