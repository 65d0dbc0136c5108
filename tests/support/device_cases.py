"""What computes on a device that is not the CPU, case by case, on the CPU and on the make-believe accelerator.

    python -m tests.support.device_cases NAME …

runs cases in a process of its own and prints one JSON line per case: the largest difference from the CPU's figures,
or the error.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentrl.config.policies import LoraConfig, PolicyConfig
from agentrl.config.run import RunConfig
from agentrl.config.sections import EngineConfig, LossConfig
from agentrl.core.ports import GenerateRequest, SamplingParams
from agentrl.core.records import PolicyVersion
from agentrl.core.tokens import ExpertRouting, KeptSets, TrainingSample, TrajectoryRow
from agentrl.engines.embedded import forward as engine_forward
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.learn import forward, forward_check, learner, losses, models, trainer
from agentrl.learn.forward import token_logprobs
from agentrl.learn.packing import pack
from tests.learn_cases import LORA, VOCABULARY, Episodes, make_rows, make_samples, run_config, write_model
from tests.learn_cases import write_tokenizer as write_tokenizer_beside
from tests.support.accelerator import COUNTERS, NAME, accelerator, register_device
from tests.support.short_start_checks import use_full_start_checks

Numbers = dict[str, Any]
Case = Callable[[torch.device, Path], Numbers]
CPU = torch.device("cpu")
TOLERANCE = 1e-5
"""Largest difference from the CPU in float32, relative to the largest entry."""
_ADAPTER = {"policy": PolicyConfig(learning_rate=1e-2, lora=LORA)}


# --- the device in agentrl --------------------------------------------------------------------------------------------


def _tied(model: Any) -> Any:
    """Tie a model's weights: torch moves each parameter by itself to a device in Python."""
    if model.device.type == NAME and model.config.get_text_config().tie_word_embeddings:
        model.tie_weights()
    return model


def dense_flex(query: Tensor, key: Tensor, value: Tensor, *, block_mask: Any, scale: Any, **_: Any) -> Tensor:
    """Compute what flex_attention computes, from its mask function, and check its lists of blocks against it."""
    count, size = query.shape[2], block_mask.BLOCK_SIZE[0]
    places, zero = torch.arange(count, device=query.device), torch.zeros((), dtype=torch.int64, device=query.device)
    visible = block_mask.mask_mod(zero, zero, places[:, None], places[None, :])
    if wrong := wrong_blocks(block_mask, visible):
        raise AssertionError(f"{wrong} blocks of {size} tokens with visible keys are not listed")
    groups = query.shape[1] // key.shape[1]
    key, value = (each.float().repeat_interleave(groups, 1, output_size=query.shape[1]) for each in (key, value))
    # Products of elements, because `COUNTERS` counts the matrix products of the model.
    scores = (query.float().unsqueeze(3) * key.unsqueeze(2)).sum(-1) * (
        query.shape[-1] ** -0.5 if scale is None else scale
    )
    chances = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return (chances.unsqueeze(-1) * value.unsqueeze(2)).sum(3).to(query.dtype)


def wrong_blocks(block_mask: Any, visible: Tensor) -> int:
    """Return the number of blocks with visible keys that a mask leaves out."""
    size = block_mask.BLOCK_SIZE[0]
    blocks = -(-len(visible) // size)
    shown, listed = (torch.zeros(blocks * edge, blocks * edge, dtype=torch.bool) for edge in (size, 1))
    shown[: len(visible), : len(visible)] = getattr(visible, "host", visible)
    for part in ("kv", "full_kv"):
        counts, indices = (getattr(block_mask, f"{part}_{name}") for name in ("num_blocks", "indices"))
        counts, indices = (getattr(each, "host", each)[0, 0].long() for each in (counts, indices))
        for row in range(blocks):
            listed[row, indices[row, : counts[row]]] = True
    return int((shown.view(blocks, size, blocks, size).any(3).any(1) & ~listed).sum())


@contextlib.contextmanager
def on_accelerator(*, dense: bool = True) -> Iterator[torch.device]:
    """Let agentrl compute on the make-believe accelerator; `dense`: with a stand-in for the kernel of its attention."""
    load, prepare, flex = models._load, engine_forward.prepare_for_sampling, forward.flex_attention
    models._load = lambda *args: _tied(load(*args))
    engine_forward.prepare_for_sampling = lambda *args: _tied(prepare(*args))
    if dense:
        forward.flex_attention = dense_flex
    try:
        with accelerator() as device:
            yield device
    finally:
        models._load, engine_forward.prepare_for_sampling, forward.flex_attention = load, prepare, flex


# --- the trainer ------------------------------------------------------------------------------------------------------


def _numbers(report: Any) -> Numbers:
    names = ("entropy", "k3", "reference_kl", "value/loss", "kept_mass", "mean_ratio")
    shown = {name: report.metrics[name] for name in names if name in report.metrics}
    return {"loss": report.loss, "grad_norm": report.grad_norm, **shown}


def _write_base(place: Path, kind: str, *, seed: int = 0) -> Path:
    if not place.is_dir():
        write_model(place, kind=kind, head_dim=16)  # the least that compiled attention computes on a GPU
        write_tokenizer_beside(place)
        if seed:
            _perturb(place, seed)
    return place


def _perturb(place: Path, seed: int) -> None:
    """Change the weights of a saved model a little."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(place)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    model.save_pretrained(place)


def _masked_rows(rows: Sequence[TrajectoryRow]) -> list[TrajectoryRow]:
    random = np.random.default_rng(0)
    return [row.with_column("kept", _random_mask(row, random)) for row in rows]


def _random_mask(row: TrajectoryRow | TrainingSample, random: np.random.Generator) -> KeptSets:
    sets = [np.unique([*random.integers(0, VOCABULARY, 5), token]) for token in row.token_ids[row.loss_mask]]
    counts = np.zeros(len(row.token_ids), np.int32)
    counts[row.loss_mask] = [len(each) for each in sets]
    return KeptSets(counts=counts, ids=np.concatenate(sets).astype(np.int32))


def training(
    *,
    kind: str = "qwen3",
    lora: bool = False,
    dtype: str = "float32",
    steps: int = 1,
    reference: str = "",
    masked: bool = False,
    routed: bool = False,
    resume: bool = False,
    **settings: Any,
) -> Case:
    """Make a case of optimizer steps through `PolicyTrainer`."""

    def run(device: torch.device, place: Path) -> Numbers:
        trainer.rank_device = lambda rank, **_: device
        base = _write_base(place / f"base-{kind}", kind)
        policy = PolicyConfig(learning_rate=1e-2, lora=LORA if lora else None)
        if reference == "model":
            policy = policy.model_copy(update={"reference": str(_write_base(place / f"teacher-{kind}", kind, seed=3))})
        config = run_config(base, policies={"policy": policy}, **settings)
        changes: dict[str, Any] = {"model": config.model.model_copy(update={"dtype": dtype})}
        if routed:
            changes["engine"] = EngineConfig(capture_routing=True, max_context=512)
        config = config.model_copy(update=changes)
        rows = make_rows(0, 8)
        if masked:
            rows = _masked_rows(rows)
        if routed:
            random = np.random.default_rng(0)
            rows = [_routed(row, random) for row in rows]
        return _trained(config, Episodes(rows), place / device.type, steps=steps, resume=resume)

    return run


def _trained(config: RunConfig, episodes: Episodes, place: Path, *, steps: int, resume: bool) -> Numbers:
    learns = trainer.PolicyTrainer(config.trainer_plan, place / "run", read=episodes.read)
    learns.start()
    COUNTERS.clear()
    found: Numbers = {}
    for step in range(1, steps + 1):
        learns.forward_backward(episodes.batch(step))
        found |= {f"{step} {name}": value for name, value in _numbers(learns.optim_step("policy", step)).items()}
    if resume:
        published = learns.publish("policy", PolicyVersion("policy", 0, steps))
        found["tensors"] = _stored_sums(Path(published.path))
        learns.save(place / "checkpoint")
        learns = trainer.PolicyTrainer(config.trainer_plan, place / "resumed", read=episodes.read)
        learns.start(place / "checkpoint")
        learns.forward_backward(episodes.batch(steps + 1))
        found |= {f"resumed {name}": value for name, value in _numbers(learns.optim_step("policy", steps + 1)).items()}
    return found


def _stored_sums(path: Path) -> list[float]:
    from safetensors.torch import load_file

    files = sorted(path.glob("*.safetensors"))
    assert files, path
    return [float(tensor.float().abs().sum()) for file in files for _, tensor in sorted(load_file(file).items())]


def _routed(row: TrajectoryRow, random: np.random.Generator) -> TrajectoryRow:
    """Record two different experts of four, per token and layer; none for a third of the tokens."""
    length = len(row.token_ids)
    drawn = random.random((length - 1, 2, 4)).argsort(axis=-1)[..., :2].astype(np.int16)
    drawn[random.random(length - 1) < 1 / 3] = -1
    return row.with_column("experts", ExpertRouting(drawn))


def passing(*, kind: str = "qwen3", masked: bool = False, shared: bool = True, pieces: bool = False) -> Case:
    """Make a case of one forward and backward pass."""

    def run(device: torch.device, place: Path) -> Numbers:
        config = run_config(_write_base(place / f"base-{kind}", kind))
        model = models.load_models(config.trainer_plan, device)["policy"].model
        random, samples = np.random.default_rng(0), make_samples(5, 6)
        if masked:
            samples = [sample.with_column("kept", _random_mask(sample, random)) for sample in samples]
        if not shared:
            model.set_attn_implementation("sdpa")
        limit, forward.MAX_LOGITS = forward.MAX_LOGITS, 7 * VOCABULARY if pieces else forward.MAX_LOGITS
        found: Numbers = {"logprobs": [], "entropies": [], "kept": []}
        try:
            for batch in pack(samples, max_tokens=60, share=shared):
                head = token_logprobs(model, batch, shared=shared, entropy_gradient=True)
                (head.logprob.sum() + head.entropy.sum()).backward()
                for name, column in zip(found, (head.logprob, head.entropy, head.kept_mass), strict=True):
                    found[name] += column.detach().cpu().tolist()
        finally:
            forward.MAX_LOGITS = limit
        gradients = (parameter.grad for parameter in model.parameters() if parameter.grad is not None)
        return {**found, "gradients": [float(each.norm()) for each in gradients]}

    return run


# --- the embedded engine ----------------------------------------------------------------------------------------------


def sampling(
    *, kind: str = "qwen3", lora: bool = False, versions: int = 1, scored: bool = False, **settings: Any
) -> Case:
    """Make a case of calls to the embedded engine before and after weights that a trainer published."""
    filters = {name: settings.pop(name) for name in ("top_k", "top_p", "min_p", "temperature") if name in settings}

    def run(device: torch.device, place: Path) -> Numbers:
        trainer.rank_device = lambda rank, **_: device
        base = _write_base(place / f"base-{kind}", kind)
        names = [f"policy{index}" for index in range(versions)] if versions > 1 else ["policy"]
        lora_config = LoraConfig(rank=4, alpha=8.0) if lora else None
        policies = {name: PolicyConfig(learning_rate=1e-2, lora=lora_config) for name in names}
        published = []
        for name in names:
            episodes = Episodes(make_rows(0, 8), policy=name)
            learns = trainer.PolicyTrainer(
                run_config(base, policies=policies).trainer_plan, place / device.type / name, read=episodes.read
            )
            learns.start()
            learns.forward_backward(episodes.batch(1))
            learns.optim_step(name, 1)
            published.append(learns.publish(name, PolicyVersion(name, 0, 1)))
        return asyncio.run(_sampled(base, names, published, device, filters, scored=scored, lora=lora, **settings))

    return run


async def _sampled(
    base: Path,
    names: Sequence[str],
    published: Sequence[Any],
    device: torch.device,
    filters: Mapping[str, Any],
    *,
    scored: bool,
    lora: bool,
    **settings: Any,
) -> Numbers:
    engine = await asyncio.to_thread(
        partial(
            EmbeddedEngine.load,
            str(base),
            versions={name: PolicyVersion(name, 0, 0) for name in names},
            slots=6,
            max_context=64,
            device=str(device),
            adapter_slots=2 * len(names) if lora else 0,
            **settings,
        )
    )
    found: Numbers = {"tokens": [], "logprobs": [], "routing": [], "kept": []}
    try:
        sessions = [engine.open(f"s{index}", names[index % len(names)]) for index in range(6)]
        for turn in range(2):
            calls = [engine.generate(session, _request(turn, index, filters)) for index, session in enumerate(sessions)]
            for call in await asyncio.gather(*calls):
                found["tokens"] += call.token_ids.tolist()
                found["logprobs"] += call.logprobs.tolist()
                if call.kept is not None:
                    found["kept"] += call.kept.ids.tolist()
                if call.experts is not None:
                    found["routing"] += call.experts.rows.reshape(-1).tolist()
            await engine.serve(published)
        if scored:
            tokens = np.arange(3, 20, dtype=np.int32)
            found["scores"] = (await engine.score(PolicyVersion(names[0], 0, 1), tokens, 0.7)).logprobs.tolist()
    finally:
        await engine.close()
    return found


def _request(turn: int, index: int, filters: Mapping[str, Any]) -> GenerateRequest:
    context = np.arange(3, 8 + index).astype(np.int32)
    return GenerateRequest(
        request_id=f"r{turn}-{index}",
        token_ids=context,
        sampling=SamplingParams(max_tokens=6, **filters),
        seed=100 * turn + index,
    )


# --- all cases --------------------------------------------------------------------------------------------------------


def _loss_case(name: str) -> Case:
    return training(loss=LossConfig(name=name), reference="model" if name in ("dpo", "distillation") else "")


_FILTERS: dict[str, Any] = {"top_k": 5, "top_p": 0.9, "capture_mask": True}
CASES: dict[str, Case] = {
    **{f"loss {name}": _loss_case(name) for name in losses.BUILT_IN},
    "full weights": training(steps=2, resume=True),
    "adapter": training(lora=True, steps=2, resume=True),
    "recomputed layers": training(recompute=True),
    "adapter, recomputed layers": training(lora=True, recompute=True),
    "offloaded masters": training(sharding="offload", resume=True),
    "adapter, offloaded masters": training(lora=True, sharding="offload"),
    "small micro-batches": training(micro_batch_tokens=40),
    "small micro-batches of a whole-step loss": training(micro_batch_tokens=40, loss=LossConfig(name="gspo")),
    "entropy bonus": training(entropy_bonus=0.01),
    "entropy bonus of a whole-step loss": training(entropy_bonus=0.01, loss=LossConfig(name="gspo")),
    "mean over sequences": training(loss=LossConfig(normalizer="sequences")),
    "divergence from the base": training(lora=True, loss=LossConfig(kl=0.1)),
    "divergence": training(lora=True, loss=LossConfig(kl=0.1)),
    "divergence from a reference": training(reference="model", loss=LossConfig(kl=0.1)),
    "distillation into an adapter": training(lora=True, reference="model", loss=LossConfig(name="distillation")),
    "distillation with reward": training(
        reference="model", loss=LossConfig(name="distillation", reward=0.5), masked=True
    ),
    "preferences of an adapter": training(lora=True, loss=LossConfig(name="dpo")),
    "masks": training(masked=True),
    "masks, small micro-batches": training(masked=True, micro_batch_tokens=40),
    "masks of a whole-step loss": training(masked=True, loss=LossConfig(name="gspo")),
    "window layers": training(kind="sliding"),
    "window layers with an adapter": training(kind="sliding", lora=True),
    "untied embeddings": training(kind="llama"),
    "experts": training(kind="moe", resume=True),
    "experts with an adapter": training(kind="mixtral", lora=True),
    "replayed routing": training(kind="moe", routed=True),
    "replayed routing, recomputed layers": training(kind="moe", routed=True, recompute=True),
    "replayed routing with an adapter": training(kind="mixtral", lora=True, routed=True),
    "replayed routing of a whole-step loss": training(kind="moe", routed=True, loss=LossConfig(name="gspo")),
    "pass": passing(),
    "pass with masks": passing(masked=True),
    "pass in pieces": passing(pieces=True),
    "pass with masks in pieces": passing(masked=True, pieces=True),
    "padded rows": passing(shared=False),
    "padded rows with masks": passing(shared=False, masked=True),
    "padded rows of experts": passing(shared=False, kind="moe"),
    "engine": sampling(),
    "engine with fixed shapes": sampling(fixed_shapes=True),
    "engine with filters": sampling(**_FILTERS),
    "engine with min-p and temperature": sampling(min_p=0.05, temperature=0.8, capture_mask=True),
    "engine with adapters": sampling(lora=True),
    "engine with many adapters": sampling(lora=True, versions=6),
    "engine with adapters and filters": sampling(lora=True, versions=2, **_FILTERS),
    "engine that records routing": sampling(kind="moe", capture_routing=True),
    "engine with adapters that records routing": sampling(kind="mixtral", lora=True, capture_routing=True),
    "engine that scores": sampling(scored=True),
    "engine with adapters that scores": sampling(lora=True, scored=True),
}
ROUNDED: dict[str, Case] = {
    "bfloat16": training(dtype="bfloat16"),
    "bfloat16 adapter": training(dtype="bfloat16", lora=True, resume=True),
    "bfloat16 offloaded masters": training(dtype="bfloat16", sharding="offload"),
    "bfloat16 adapter, offloaded masters": training(dtype="bfloat16", lora=True, sharding="offload"),
}
"""Cases that round differently on a device, so that only their errors count, and their loss within 1 %."""


# --- planted faults ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, make(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def _host_arguments(method: Any) -> Any:
    return lambda self, *args, **kwargs: method(self, *map(_on_host, args), **kwargs)


def _host_result(function: Any) -> Any:
    return lambda *args, **kwargs: _on_host(function(*args, **kwargs))


def _host_head(head: Any) -> Any:
    return lambda width, device, updates: head(width, torch.device("cpu"), updates)


PLANTED: dict[str, tuple[str, Any, str, Callable[[Any], Any]]] = {
    "weights of the loss": ("loss ppo", losses.Loss, "evaluate", _host_arguments),
    "recorded experts": ("replayed routing", forward.RoutingReplay, "force_choice", _host_arguments),
    "kept sets": ("masks", forward.KeptVocabularySets, "mask", _host_result),
    "parameters of the value head": ("value head", learner, "ValueHead", _host_head),
    "filters of the engine": ("engine with filters", engine_forward, "sampling_filter_mask", _host_result),
}
"""By fault: the case that meets it, and the function that is replaced."""


# --- what a micro-batch costs the host --------------------------------------------------------------------------------


def _step(*, kind: str = "qwen3", lora: bool = True, dtype: str = "float32", **settings: Any) -> dict[str, float]:
    """Take a step of small micro-batches; return what each costs the host, and the share of float32 products."""
    passes = 0

    def counting(method: Any) -> Any:
        def counted(*args: Any, **named: Any) -> Any:
            nonlocal passes
            passes += 1
            return method(*args, **named)

        return counted

    case = training(kind=kind, lora=lora, dtype=dtype, micro_batch_tokens=30, **settings)
    with (
        _replaced(models.PolicyModel, "token_logprobs", counting),
        tempfile.TemporaryDirectory() as place,
        on_accelerator() as device,
    ):
        case(device, Path(place))
    matmuls = COUNTERS.matmuls
    return {
        "micro_batches": passes,
        "waits": sum(COUNTERS.waits.values()),
        "waits_per_micro_batch": sum(COUNTERS.waits.values()) / passes,
        "copies_per_micro_batch": sum(COUNTERS.copies.values()) / passes,
        "float32_matmuls_share": matmuls[torch.float32] / sum(matmuls.values()),
    }


def silent_fallbacks() -> int:
    """Return the number of models that share no prefixes on a device without the kernel, and do not say why."""
    silent = 0
    for kind in ("qwen3", "sliding", "moe"):
        with tempfile.TemporaryDirectory() as place, on_accelerator(dense=False) as device:
            trainer.rank_device = lambda rank, device=device, **_: device
            learns = trainer.PolicyTrainer(
                run_config(_write_base(Path(place) / kind, kind)).trainer_plan, Path(place) / "run"
            )
            lines = " ".join(learns.start())
            silent += not ("computed once" in lines or "ValueError" in lines)
    return silent


def compiled_kernels() -> dict[str, float]:
    """Start a trainer and an engine, sample, and take two steps; return how many attention kernels a card would compile
    before the first token, and in all: one for each dtype, shape of heads and set of options, with and without
    gradients.
    """
    kernels: set[object] = set()

    def compiled(query: Tensor, key: Tensor, *rest: Any, kernel_options: Any, **named: Any) -> Tensor:
        heads = (query.dtype, query.shape[1], key.shape[1], query.shape[-1])
        kernels.add((*heads, torch.is_grad_enabled(), *sorted(kernel_options.items())))
        return dense_flex(query, key, *rest, **named)

    def on_card(device: torch.device) -> bool:
        return device.type == NAME

    with (
        tempfile.TemporaryDirectory() as directory,
        on_accelerator() as device,
        _replaced(forward, "compiles_attention", lambda _: on_card),
        _replaced(trainer, "compiles_attention", lambda _: on_card),
        _replaced(forward_check, "compiles_attention", lambda _: on_card),
        _replaced(forward, "_compiled_flex", lambda _: lambda: compiled),
        _replaced(forward, "_shared_memory", lambda _: lambda device: 232_448),
    ):
        place = Path(directory)
        trainer.rank_device = lambda rank, **_: device
        base = _write_base(place / "base", "qwen3")
        episodes = Episodes(make_rows(0, 8))
        learns = trainer.PolicyTrainer(
            run_config(base, policies=_ADAPTER).trainer_plan, place / "run", read=episodes.read
        )
        learns.start()
        version = learns.publish("policy", PolicyVersion("policy", 0, 0))
        asyncio.run(_sampled(base, ["policy"], [version], device, {}, scored=False, lora=True))
        before = len(kernels)
        for step in (1, 2):
            learns.forward_backward(episodes.batch(step))
            learns.optim_step("policy", step)
    return {"before_first_token": before, "in_all": len(kernels)}


KERNELS = "compiled kernels"

STEPS: dict[str, Callable[[], dict[str, float]]] = {
    "adapter, one step": _step,
    "bfloat16 adapter, one step": partial(_step, dtype="bfloat16"),
    "masks, one step": partial(_step, masked=True),
    "replayed routing, one step": partial(_step, kind="moe", lora=False, routed=True),
    "whole-step loss, one step": partial(_step, loss=LossConfig(name="gspo")),
}


# --- the command ------------------------------------------------------------------------------------------------------


def largest_difference(found: Numbers, expected: Numbers) -> float:
    """Return the largest difference between the figures of two runs, each relative to its largest entry."""
    assert found.keys() == expected.keys(), (found.keys(), expected.keys())
    worst = 0.0
    for name, values in expected.items():
        ours, theirs = (np.atleast_1d(np.asarray(each, np.float64)) for each in (found[name], values))
        if ours.shape != theirs.shape:
            return float("inf")
        if theirs.size:
            worst = max(worst, float(np.abs(ours - theirs).max() / max(np.abs(theirs).max(), 1e-6)))
    return worst


def compared(case: Case) -> dict[str, Any]:
    """Run a case on both devices; return the difference, the counters of the device, or the error."""
    with tempfile.TemporaryDirectory() as place:
        expected = case(CPU, Path(place))
        COUNTERS.clear()
        try:
            with on_accelerator() as device:
                found = case(device, Path(place))
        except Exception as error:  # noqa: BLE001 - the other cases count as well
            frames = traceback.extract_tb(error.__traceback__)
            lines = [f"{each.filename}:{each.lineno}" for each in frames if "/agentrl/" in each.filename]
            return {"error": f"{type(error).__name__}: {error}", "at": lines[-3:]}
    return {
        "difference": largest_difference(found, expected),
        "loss": largest_difference({"loss": found.get("1 loss", 0.0)}, {"loss": expected.get("1 loss", 0.0)}),
        "waits": dict(COUNTERS.waits),
        "copies": dict(COUNTERS.copies),
    }


def is_found(fault: str) -> bool:
    """Whether a planted fault is found as such."""
    case, owner, name, make = PLANTED[fault]
    with _replaced(owner, name, make), tempfile.TemporaryDirectory() as place:
        try:
            with on_accelerator() as device:
                CASES[case](device, Path(place))
        except Exception as error:  # noqa: BLE001 - an engine wraps what its worker raises
            return "expected all tensors on one device" in "".join(traceback.format_exception(error))
    return False


def measured(name: str) -> dict[str, Any]:
    """Return the result of a case, a step or a planted fault."""
    if name in PLANTED:
        return {"found": is_found(name)}
    if name == KERNELS:
        return dict(compiled_kernels())
    return dict(STEPS[name]()) if name in STEPS else compared({**CASES, **ROUNDED}[name])


def main(names: Sequence[str]) -> None:
    """Run what is named, or everything."""
    warnings.simplefilter("ignore")
    use_full_start_checks(False)
    register_device()
    for name in names or [*CASES, *ROUNDED, *STEPS, *PLANTED]:
        sys.stdout.write(json.dumps({"name": name, **measured(name)}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
