"""The memory plan of a run: what is computed without data is what a real step allocates."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

import agentrl
from agentrl.app import memory_estimate as run_memory
from agentrl.app import training
from agentrl.app.memory_estimate import (
    MemoryEstimate,
    MemoryPart,
    check_gpu_memory,
    estimate_memory,
    gpu_memory_needs,
    with_chosen_token_limits,
)
from agentrl.app.run_parts import PROMPT_TASKS, check_prompts, first_prompts, make_chat_format
from agentrl.cli.main import main
from agentrl.config.devices import CONTEXT
from agentrl.config.load import load
from agentrl.config.policies import LoraConfig, PolicyConfig
from agentrl.config.run import RunConfig
from agentrl.config.sections import SamplingConfig
from agentrl.core.errors import ConfigError, ModelError
from agentrl.core.machine import GIB, Gpu, Memory, process_memory_bytes
from agentrl.engines.embedded.slots import SlotKvCache
from agentrl.engines.meta import runnable_on_meta
from agentrl.engines.models import read_meta_model
from agentrl.environments.calculator import Calculator
from agentrl.learn import forward, memory_prediction
from agentrl.learn.forward import TOP_TOKENS, token_logprobs
from agentrl.learn.memory_prediction import AllocationCounter, TrainerMemoryPredictor, make_worst_case_samples
from agentrl.learn.models import load_models
from agentrl.learn.packing import pack
from tests.learn_cases import plans, predict_trainer_memory, run_config, write_model

OVERRIDES = ("--trainer.micro_batch_tokens=600", "--policies.solver.step_size=8")


def configured(repository: Path, *overrides: str) -> RunConfig:
    return load(repository / "examples/01_tool_use.toml", [*OVERRIDES, *overrides])


def allocated(config: RunConfig) -> int:
    """Bytes that a step on the longest rows allocates at its peak, beside the gradients of an earlier micro-batch."""
    (model,) = load_models(config.trainer_plan, torch.device("cpu")).values()
    (batch,) = pack(
        make_worst_case_samples(config.trainer_plan, "solver", model), max_tokens=1 << 30, share=model.shared_prefixes
    )

    def step() -> None:
        output = token_logprobs(model.model, batch, shared=model.shared_prefixes)
        (output.logprob.sum() + output.entropy.sum()).backward()

    step()
    gradients = [each.grad for each in model.parameters.values() if each.grad is not None]
    parameters = [*model.model.parameters(), *model.model.buffers(), *model.parameters.values()]
    with AllocationCounter([*parameters, *gradients]) as counted:
        step()
    return counted.peak


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param([], id="all weights"),
        pytest.param(["--policies.solver.lora.rank=4"], id="adapter"),
        pytest.param(["--policies.solver.lora.rank=4", "--model.dtype=bfloat16"], id="adapter, bfloat16"),
        pytest.param(["--trainer.recompute=true"], id="recomputed"),
    ],
)
def test_the_activations_of_the_plan_are_those_of_a_real_step(repository: Path, overrides: list[str]) -> None:
    config = configured(repository, *overrides)
    (planned,) = (
        part.bytes
        for part in estimate_memory(config.engine_plan, config.trainer_plan).parts
        if part.name.startswith("activations")
    )
    assert planned == allocated(config)


def test_the_divergence_from_a_reference_is_planned(repository: Path) -> None:
    """The plan equals what a step allocates that compares each distribution with a reference's likeliest tokens.

    Kernels that run without data do not allocate one buffer of the size of some logits, so it is not counted.
    """
    config = configured(repository)
    teacher = ["--trainer.loss.name=distillation", f"--policies.solver.reference={config.model.path}"]
    (planned,) = (
        part.bytes
        for part in estimate_memory(*plans(configured(repository, *teacher))).parts
        if part.name.startswith("activations")
    )
    (model,) = load_models(config.trainer_plan, torch.device("cpu")).values()
    (batch,) = pack(
        make_worst_case_samples(config.trainer_plan, "solver", model), max_tokens=1 << 30, share=model.shared_prefixes
    )
    with torch.no_grad():
        reference = token_logprobs(model.model, batch, shared=model.shared_prefixes, top=TOP_TOKENS)

    def step() -> None:
        output = token_logprobs(model.model, batch, shared=model.shared_prefixes, reference=reference)
        assert output.reference_kl is not None
        (output.logprob.sum() + output.entropy.sum() + output.reference_kl.sum()).backward()

    step()
    gradients = [each.grad for each in model.parameters.values() if each.grad is not None]
    with AllocationCounter([*model.model.parameters(), *model.model.buffers(), *gradients]) as counted:
        step()
    held = sum(column.nbytes for column in reference if column is not None)
    assert planned == pytest.approx(counted.peak + held, rel=0.03)
    assert planned > allocated(config)


def test_rounded_copies_of_all_weights_change_the_activations_by_little(repository: Path) -> None:
    config = configured(repository, "--model.dtype=bfloat16")
    plan = {
        part.name: part.bytes for part in estimate_memory(config.engine_plan, config.trainer_plan).parts if part.bytes
    }
    (planned,) = (size for name, size in plan.items() if name.startswith("activations"))
    (trained,) = (size for name, size in plan.items() if name.startswith("trained parameters"))
    assert planned == pytest.approx(allocated(config), rel=0.1), (
        "bfloat16 gradients are moved to the masters one by one"
    )
    assert trained == 8 * plan["weights in bfloat16"], "masters, gradients and moments: 16 bytes beside 2"


def test_each_part_is_its_arithmetic(repository: Path) -> None:
    parts = {part.name: part for part in estimate_memory(*plans(configured(repository))).parts if part.bytes}
    (trained,) = (part.bytes for name, part in parts.items() if name.startswith("trained parameters"))
    weights = json.loads((repository / "environments/calculator/model/config.json").read_text())
    kept = 2 * weights["num_key_value_heads"] * weights["head_dim"] * weights["num_hidden_layers"] * 4
    assert parts["keys and values of 96 contexts of 192 tokens"].bytes == 96 * 193 * kept
    assert trained == 4 * parts["weights in float32"].bytes, "weights, gradients, and the two moments of AdamW"


def test_bfloat16_halves_the_weights_of_an_engine(repository: Path) -> None:
    def planned(*overrides: str) -> tuple[int, int]:
        plan = estimate_memory(*plans(configured(repository, "--policies.solver.lora.rank=4", *overrides)))
        held = ("weights in", "trained parameters")
        weights, trained = (sum(part.bytes for part in plan.parts if part.name.startswith(name)) for name in held)
        return weights, trained

    weights, trained = planned("--model.dtype=float32")
    rounded, masters = planned("--model.dtype=bfloat16")
    assert trained == masters
    assert weights == 2 * (rounded - masters // 8), "and 2 bytes for each trained parameter, its rounded copy"


def test_doctor_says_what_a_run_will_hold(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_memory, "machine_memory", lambda: Memory(free=1 << 36, total=1 << 36))
    assert main(["doctor", str(repository / "examples/01_tool_use.toml"), "--trainer.ranks=3", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    found = [(check["name"], check["result"]) for check in report["sections"]["memory"]]
    assert any(name == "3 × trainer rank" and "activations of 8,192 tokens" in text for name, text in found)
    assert any(name == "engine, in this process" and "keys and values" in text for name, text in found)
    assert found[-1][0] == "the whole run"


def test_a_rank_of_several_holds_its_shard(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_memory, "machine_memory", lambda: Memory(free=1 << 36, total=1 << 36))
    ranks = ["doctor", str(repository / "examples/01_tool_use.toml"), *OVERRIDES, "--trainer.ranks=4", "--json"]
    assert main([*ranks, "--trainer.sharding=full"]) == 0
    report = json.loads(capsys.readouterr().out)
    found = [check["result"] for check in report["sections"]["memory"] if check["name"] == "4 × trainer rank"]
    assert any("1/4 of weights" in text for text in found)
    assert any("layers" in text for text in found)


def test_doctor_says_what_does_not_fit_and_what_to_turn(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_memory, "machine_memory", lambda: Memory(free=1 << 28, total=1 << 30))
    assert main(["doctor", str(repository / "examples/01_tool_use.toml"), *OVERRIDES]) == 1
    said = capsys.readouterr().out
    assert "it does not fit" in said
    assert "trainer.micro_batch_tokens" in said


def test_a_run_that_cannot_fit_the_machine_is_refused_before_it_loads(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_memory, "machine_memory", lambda: Memory(free=1 << 22, total=1 << 23))
    command = ["train", str(repository / "examples/01_tool_use.toml"), f"--directory={tmp_path}"]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert re.search(r"needs at least [\d.]+ GiB, and this machine has 0\.0: set ", said)
    assert "the trainer is ready" not in said


@pytest.mark.parametrize("command", ["train", "evaluate", "doctor"])
def test_a_context_that_holds_no_first_prompt_is_named_before_anything_is_loaded(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    options = [f"--directory={tmp_path}"] if command == "train" else []
    options += ["--engine.max_context=12", "--sampling.max_tokens=8"]
    assert main([command, str(repository / "examples/01_tool_use.toml"), *options]) != 0
    told = capsys.readouterr()
    assert "prompts do not fit engine.max_context = 12: they have up to" in told.out + told.err


def test_prompts_that_do_not_fit_beside_others_that_do_are_a_warning() -> None:
    assert check_prompts([[1] * 9, [1] * 20], 10) == [
        "1 of the first 2 prompts do not fit engine.max_context = 10: they have up to 20 tokens. Raise it, or shorten "
        "the prompts; such episodes are dropped as prompt_too_long"
    ]
    assert check_prompts([[1] * 9], 10) == check_prompts([], 10) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("vocab_size", 2**50), ("num_hidden_layers", 10**9), ("hidden_size", 10**8), ("vocab_size", 10**400)],
    ids=["vocabulary", "layers", "width", "beyond float"],
)
def test_sizes_of_no_model_are_named_at_once(repository: Path, tmp_path: Path, name: str, value: int) -> None:
    shutil.copytree(repository / "environments/calculator/model", tmp_path / "model")
    path = tmp_path / "model/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    with pytest.raises(ModelError, match=name):
        estimate_memory(*plans(configured(repository, f"--model.path={tmp_path / 'model'}")))


def test_a_context_beyond_the_positions_is_named(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["doctor", str(repository / "examples/01_tool_use.toml"), *OVERRIDES, "--engine.max_context=100000"]) == 1
    )
    assert "1024 positions" in capsys.readouterr().out


def test_contexts_take_memory_as_they_are_written(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(write_model(tmp_path / "model"))
    cache = SlotKvCache(model, slots=64, capacity=1 << 14)
    before = process_memory_bytes().anonymous
    new, positions = torch.ones(1, 2, 64, 64), torch.arange(64)[None]
    for slot in range(4):
        cache.address(first=slot, count=1, rows=None, positions=positions, length=64)
        keys, _ = cache.update(new, new, 0)
        assert bool((keys == 1).all())
    whole = 2 * 64 * (1 << 14) * new[0, :, 0].nbytes
    assert whole == 1 << 30
    assert process_memory_bytes().anonymous - before < whole // 20


def cards(monkeypatch: pytest.MonkeyPatch, count: int, gib: int) -> None:
    """A machine with GPUs."""
    monkeypatch.setattr("agentrl.config.run.MIN_GPU_PARAMETERS", 0)  # so small a model would stay on the CPU
    there = tuple(Gpu(str(at), "card", Memory(gib << 30, gib << 30)) for at in range(count))
    monkeypatch.setattr("agentrl.core.machine.gpus", lambda: there)


DETERMINISTIC = ("--deterministic=true", "--policies.solver.max_staleness=0")
LORA = ("--policies.solver.lora.rank=4", "--model.dtype=bfloat16")
VLLM = (*OVERRIDES, "--engine.vllm.enforce_eager=true", *LORA)


def test_doctor_prints_the_device_plan_and_each_share(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cards(monkeypatch, 1, 24)
    assert main(["doctor", str(repository / "examples/01_tool_use.toml"), *VLLM, "--json"]) == 0
    found = [(each["name"], each["result"]) for each in json.loads(capsys.readouterr().out)["sections"]["memory"]]
    assert any(name == "devices" and text.startswith("GPU 0: ") for name, text in found)
    assert any(name == "engine 0 on GPU 0" and "needed of 10.80 GiB" in text for name, text in found)


def test_doctor_names_offloading_and_counts_what_is_offloaded(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_memory, "machine_memory", lambda: Memory(free=1 << 36, total=1 << 36))

    def planned(*overrides: str, ranks: int = 1) -> MemoryEstimate:
        cards(monkeypatch, ranks, 24)
        return estimate_memory(
            *plans(configured(repository, "--cluster.address=local", f"--trainer.ranks={ranks}", *overrides))
        )

    def trained(plan: MemoryEstimate | None) -> list[str]:
        return [] if plan is None else [part.name for part in plan.parts if "AdamW" in part.name]

    plain, one = planned(), planned("--trainer.sharding=offload")
    assert any("trainer.sharding = 'offload'" in setting for setting in plain.settings_to_turn())
    assert plain.offloaded is None
    assert trained(plain)
    assert one.offloaded is not None
    assert (trained(one), trained(one.offloaded)) == ([], trained(plain))
    assert one.total == plain.total - one.offloaded.total * 3 // 4, "a copy in float32 stays, with which it computes"
    two = planned("--trainer.sharding=offload", ranks=2).offloaded
    assert two is not None
    assert len(two.parts) == 2, "the shards that layers are gathered from, too"
    offloaded = [str(repository / "examples/01_tool_use.toml"), *OVERRIDES, "--trainer.sharding=offload"]
    cards(monkeypatch, 1, 24)
    assert main(["doctor", *offloaded]) == 0
    assert "free in main memory" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setattr(run_memory, "machine_memory", lambda: Memory(free=1 << 20, total=1 << 36))
    assert main(["doctor", *offloaded]) == 1
    assert "does not fit" in " ".join(capsys.readouterr().out.split())


def test_doctor_says_which_share_of_a_gpu_is_too_small(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cards(monkeypatch, 1, 24)
    tiny = ["--engine.memory_share=0.0001", "--trainer.micro_batch_tokens=8192"]
    assert main(["doctor", str(repository / "examples/01_tool_use.toml"), *VLLM, *tiny]) == 1
    said = capsys.readouterr().out
    assert "engine 0 on GPU 0" in said
    assert "larger engine.memory_share" in said
    assert main(["doctor", str(repository / "examples/01_tool_use.toml"), *VLLM, "--engine.replicas=2"]) == 1
    assert "do not fit on 1 GPU" in capsys.readouterr().out


def test_memory_of_a_gpu_that_another_process_holds_is_told_by_doctor_and_before_a_run(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = Gpu("0", "card", Memory(free=2 << 30, total=24 << 30))
    monkeypatch.setattr("agentrl.core.machine.gpus", lambda: (gpu,))
    file = str(repository / "examples/01_tool_use.toml")
    words = "GPU 0: engine 0 takes 45% of its memory, 10.8 GiB, and 2.0 are free: stop what else computes there"
    assert main(["doctor", file, *VLLM]) == 1
    assert words in " ".join(capsys.readouterr().out.split())
    assert main(["train", file, *VLLM, f"--directory={tmp_path}"]) != 0
    assert words in " ".join(capsys.readouterr().err.split())


def test_an_argument_that_vllm_does_not_know_is_found_by_doctor(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", str(repository / "examples/05_vllm.toml"), "--engine.vllm.enforce_eagr=true"]) == 1
    assert "did you mean enforce_eager" in capsys.readouterr().out


def test_what_the_system_can_take_back_is_expected_and_need_not_be_free(repository: Path) -> None:
    memory = estimate_memory(*plans(configured(repository)))
    mapped = [part for part in memory.parts if part.is_mapped]
    assert [part.name for part in mapped] == ["their code, mapped from files"]
    assert sum(part.bytes * part.processes for part in memory.parts) == memory.total + mapped[0].bytes
    assert 0 < memory.least < memory.total


def test_the_rows_to_expect_follow_from_the_first_prompts(repository: Path) -> None:
    def estimate(length: int, *overrides: str) -> MemoryEstimate:
        config = configured(repository, "--sampling.max_turns=1", *overrides)
        prompts = [[*range(length), 90 + number] for number in range(2)]
        return estimate_memory(*plans(config), prompts)

    def activations(memory: MemoryEstimate) -> tuple[int, int]:
        (part,) = (part for part in memory.parts if part.name.startswith("activations"))
        return part.expected_bytes, part.bytes

    short, long = estimate(20), estimate(100)
    assert activations(short)[0] < activations(long)[0] < activations(long)[1]
    assert activations(short)[1] == activations(long)[1], "what it may grow to"
    assert re.fullmatch(r"about [\d.]+ GiB at its peak, at least [\d.]+ GiB(, up to .*)?", short.sizes)


def test_a_prediction_does_not_depend_on_earlier_ones(repository: Path) -> None:
    """Short rows tell whether a pass loops over its tokens; more rows make more operations, too."""
    trainer = configured(repository, "--policies.solver.step_size=64").trainer_plan
    alone, after_another = TrainerMemoryPredictor(trainer), TrainerMemoryPredictor(trainer)
    after_another.predict(trainer.max_context, 4 * trainer.max_context)
    assert after_another.predict(91, 45 * 91) == alone.predict(91, 45 * 91)


def test_no_context_needs_less_than_a_shorter_one_and_none_less_than_its_pass(tmp_path: Path) -> None:
    """A large vocabulary: the logits of 1,024 trained tokens are computed in pieces."""
    path = write_model(tmp_path / "model")
    shape = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(shape | {"vocab_size": 151_936, "max_position_embeddings": 1 << 15}))
    policies = {"policy": PolicyConfig(lora=LoraConfig(rank=16), step_size=4)}
    config = run_config(path, policies=policies).model_copy(update={"sampling": SamplingConfig(max_tokens=2048)})
    predictor = TrainerMemoryPredictor(config.trainer_plan)
    contexts = [1 << power for power in range(9, 16)]
    predicted = [predictor.predict(context, context).activations for context in contexts]
    assert predicted == sorted(predicted)
    (model,) = predictor.models.values()
    for context, bytes_of_context in zip(contexts, predicted, strict=True):
        with runnable_on_meta(model.model):
            plan = config.trainer_plan.with_token_limits(context, context)
            assert bytes_of_context >= memory_prediction._step(plan, "policy", model, context).peak


def test_prompts_are_those_of_the_first_tasks(repository: Path) -> None:
    class Own(Calculator):
        async def run(self, ctx: agentrl.EpisodeContext) -> None:
            raise AssertionError("an episode is not played for an estimate")

    class Broken(Calculator):
        def prompt(self, task: agentrl.Task) -> str:
            raise KeyError(task.id)

    chat_format, tasks = make_chat_format(configured(repository).model), Calculator.tasks("train")
    prompts = first_prompts(Calculator, tasks, chat_format)
    assert len(prompts) == PROMPT_TASKS
    for number, tokens in enumerate(prompts):
        assert tasks[number].data["question"] in chat_format.decode(tokens)
        assert "calculate" in chat_format.decode(tokens)
    assert first_prompts(Own, tasks, chat_format) == first_prompts(Broken, tasks, chat_format) == []


def test_a_checkpoint_is_mapped_until_other_memory_takes_its_place() -> None:
    def parts(keys: int) -> list[MemoryPart]:
        part = partial(MemoryPart, process="engine")
        return [part(name="weights", bytes=200, file_bytes=100), part(name="keys", bytes=keys)]

    (mapped,) = run_memory._mapped_weights(parts(30))
    assert (mapped.process, mapped.bytes, mapped.is_mapped) == ("engine", 70, True)
    assert run_memory._mapped_weights(parts(100)) == []
    same = MemoryPart(process="engine", name="weights", bytes=100, file_bytes=101)
    assert run_memory._mapped_weights([same]) == [], "the weights are the mapped file"


def test_copies_between_steps_are_planned(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the gradients that ranks sum, and of the weights that are sent to an engine, a bucket at a time."""
    ranks = ("--trainer.ranks=2", "--trainer.sharding=none", "--model.dtype=float32")
    config = configured(repository, *ranks)
    (model,) = load_models(config.trainer_plan, torch.device("meta")).values()
    sizes = [each.nbytes for each in model.parameters.values()]
    assert predict_trainer_memory(config).copies == sum(sizes)
    monkeypatch.setattr(memory_prediction, "BUCKET", max(sizes) // 2)
    assert predict_trainer_memory(config).copies == max(sizes), "the largest tensor is a bucket"
    assert predict_trainer_memory(configured(repository, "--policies.solver.lora.rank=4")).copies == 0


# --- a GPU that is too small or too full, before a run ----------------------------------------------------------------


@pytest.fixture(scope="module")
def large_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 0.4 billion parameters without its weights, so that nothing can load it."""
    directory = tmp_path_factory.mktemp("large") / "model"
    shape = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 4, "vocab_size": 100_000}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096}
    Qwen3Config(**shape, **heads, tie_word_embeddings=True, dtype="bfloat16").save_pretrained(directory)
    return directory


def large_run(repository: Path, base: Path, *overrides: str) -> RunConfig:
    sizes = ("--engine.max_context=1024", "--trainer.micro_batch_tokens=1024", "--engine.slots=8")
    return configured(repository, f"--model.path={base}", *sizes, "--engine.vllm.enforce_eager=true", *overrides)


TRAINED = re.compile(r"needs at least ([\d.]+) GiB and may take ([\d.]+): ([\d.]+) GiB are missing")


def test_a_trainer_that_does_not_fit_beside_vllm_is_refused_with_what_is_missing(
    repository: Path, large_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = large_run(repository, large_base)
    cards(monkeypatch, 1, 24)
    assert check_gpu_memory(config.engine_plan, config.trainer_plan) == []
    parameters = sum(each.numel() for each in read_meta_model(large_base, max_context=1024).parameters())
    cards(monkeypatch, 1, 12)
    with pytest.raises(ConfigError, match=r"GPU 0 \(12\.0 GiB, 12\.0 free\) is too small for trainer rank 0") as raised:
        check_gpu_memory(config.engine_plan, config.trainer_plan)
    assert "Set trainer.sharding = 'offload', a policies.NAME.lora" in str(raised.value)
    needed, allowed, missing = (float(size) for size in TRAINED.findall(str(raised.value))[0])
    assert needed == pytest.approx(parameters * (2 + 16) / GIB, abs=0.05)
    assert allowed == pytest.approx(12 * 0.55 - 2 * CONTEXT / GIB, abs=0.05)
    assert missing == pytest.approx(needed - allowed, abs=0.11)
    cards(monkeypatch, 2, 12)
    assert check_gpu_memory(config.engine_plan, config.trainer_plan) == [], "a second card takes the engine"


def test_an_evaluation_is_refused_a_gpu_that_is_too_small_for_its_engine(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = Gpu("0", "card", Memory(free=1 << 20, total=1 << 20))
    monkeypatch.setattr("agentrl.core.machine.gpus", lambda: (card,))
    config = configured(repository, "--engine.max_context=256", "--engine.vllm.enforce_eager=true")
    with pytest.raises(ConfigError, match=r"GPU 0 .* is too small for engine 0"):
        agentrl.evaluate(config)


def test_memory_that_another_process_holds_is_missing_in_the_trainers_part(
    repository: Path, large_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = Gpu("0", "card", Memory(free=17 << 30, total=24 << 30))
    monkeypatch.setattr("agentrl.core.machine.gpus", lambda: (card,))
    with pytest.raises(ConfigError, match=r"17\.0 free"):
        check_gpu_memory(*plans(large_run(repository, large_base)))


def test_two_policies_that_train_all_weights_share_a_gpu_or_are_refused_with_what_is_missing(
    repository: Path, large_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = large_run(repository, large_base)
    policies = {"solver": config.policies["solver"], "other": config.policies["solver"]}
    config = RunConfig.model_validate(config.model_dump(exclude_none=True) | {"policies": policies})
    cards(monkeypatch, 1, 48)
    assert check_gpu_memory(config.engine_plan, config.trainer_plan) == []
    cards(monkeypatch, 1, 24)
    with pytest.raises(ConfigError) as raised:
        check_gpu_memory(config.engine_plan, config.trainer_plan)
    (trainer,) = TRAINED.findall(str(raised.value))
    assert float(trainer[2]) == pytest.approx(float(trainer[0]) - float(trainer[1]), abs=0.11)
    config = config.model_copy(update={"engine": config.engine.model_copy(update={"memory_share": 0.03})})
    cards(monkeypatch, 1, 48)
    with pytest.raises(ConfigError) as raised:
        check_gpu_memory(config.engine_plan, config.trainer_plan)
    assert len(TRAINED.findall(str(raised.value))) == 2, "neither engine has room for weights and one context"
    assert "too small for engine 1 of " in str(raised.value)


def test_what_is_only_predicted_to_be_too_much_is_a_warning(
    repository: Path, large_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards(monkeypatch, 1, 15)
    long = ("--engine.max_context=4096", "--trainer.micro_batch_tokens=32768")
    (told,) = check_gpu_memory(*plans(large_run(repository, large_base, *long)))
    assert re.search(r"trainer rank 0 may need [\d.]+ GiB of GPU 0, and may take 7\.4", told)

    def fails(*_: object) -> MemoryEstimate:
        raise RuntimeError("no prediction")

    monkeypatch.setattr(run_memory, "estimate_memory", fails)
    (told,) = check_gpu_memory(*plans(large_run(repository, large_base)))
    assert "no prediction" in told


def test_chosen_sizes_fit_the_trainers_part_of_a_shared_card(
    repository: Path, large_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cards(monkeypatch, 1, 24)
    sizes = ("--engine.max_context=0", "--trainer.micro_batch_tokens=0")
    config = with_chosen_token_limits(large_run(repository, large_base, *sizes), {})
    needs = gpu_memory_needs(config.engine_plan, estimate_memory(config.engine_plan, config.trainer_plan))
    assert {need.user for need in needs} == {"trainer rank 0", "engine 0"}
    assert all(need.needed <= need.allowed for need in needs)


def test_a_card_that_is_too_full_is_refused_before_anything_is_loaded(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def loads(*_: object) -> None:
        raise AssertionError("the run was started")

    monkeypatch.setattr(training, "supervise", loads)
    card = Gpu("0", "card", Memory(free=1 << 20, total=24 << 30))
    monkeypatch.setattr("agentrl.core.machine.gpus", lambda: (card,))
    monkeypatch.setattr("agentrl.config.run.MIN_GPU_PARAMETERS", 0)
    command = ["train", str(repository / "examples/01_tool_use.toml"), f"--directory={tmp_path}"]
    assert main([*command, "--trainer.micro_batch_tokens=512", "--engine.max_context=512"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert re.search(r"the run needs at least [\d.]+ GiB of its GPUs, and 0\.0 are free: [\d.]+ GiB are missing", told)
    assert "stop what else computes there" in told
    assert not list(tmp_path.glob("*/journal"))


def test_chunks_of_one_shape_are_computed_once_and_need_the_same_memory(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(repository, "--policies.solver.step_size=64").with_token_limits(192, 20 * 192)
    model = TrainerMemoryPredictor(config.trainer_plan).models["solver"]

    def measured() -> tuple[int, int]:
        with runnable_on_meta(model.model):
            step = memory_prediction._step(config.trainer_plan, "solver", model, 192)
        return step.peak, step.operations

    size, operations = measured()
    monkeypatch.setattr(forward, "_computed_chunks", lambda chunks, query: range(len(chunks)))
    size_of_all, operations_of_all = measured()
    assert size == size_of_all
    assert 2 * operations < operations_of_all


def test_a_storage_at_the_address_of_a_freed_one_is_counted() -> None:
    """Models replace their buffers within a step, such as Phi-3 its frequencies."""
    ignored = [torch.empty(64, device="meta") for _ in range(100)]
    with AllocationCounter(ignored) as counter:
        ignored.clear()
        held = [torch.empty(64, device="meta") for _ in range(100)]
    assert counter.live == len(held) * 64 * 4


def test_a_pass_that_is_given_up_leaves_gradients_on(repository: Path) -> None:
    """The error may be raised where a mode is restored."""
    config = configured(repository, "--policies.solver.step_size=4").with_token_limits(64, 128)
    model = TrainerMemoryPredictor(config.trainer_plan).models["solver"]
    with runnable_on_meta(model.model):
        whole = memory_prediction._step(config.trainer_plan, "solver", model, 64).operations
        for limit in range(whole - 120, whole):
            with contextlib.suppress(memory_prediction._TooManyOperationsError):
                memory_prediction._step(config.trainer_plan, "solver", model, 64, limit=limit)
            assert torch.is_grad_enabled(), limit
