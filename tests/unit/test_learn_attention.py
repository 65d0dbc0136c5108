"""Attention over a prefix tree: every row as if it stood alone, in memory linear in tokens, on both paths."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface

from agentrl.config.policies import LoraConfig
from agentrl.core.errors import ModelError
from agentrl.core.tokens import TrainingSample
from agentrl.learn import forward
from agentrl.learn import trainer as trainer_module
from agentrl.learn.forward import (
    ATTENTION,
    TreeAttentionMask,
    flex_options,
    flex_tree_attention,
    sharing_pays,
    tree_attention,
)
from agentrl.learn.packing import LONGEST_PADDED, MicroBatch, TreeSize, pack, padded_rows
from agentrl.learn.trainer import PolicyTrainer
from tests.learn_cases import Episodes, make_rows, run_config, write_model

HEADS, KEY_HEADS, WIDTH = 4, 2, 16
CPU = torch.device("cpu")


def rows_of(lengths: Sequence[int], shared: Sequence[int], seed: int = 0) -> list[TrainingSample]:
    """Rows of random tokens; row i begins with the first `shared[i]` tokens of one preamble."""
    rng = np.random.default_rng(seed)
    preamble = rng.integers(0, 1000, max(shared, default=0))
    rows = []
    for length, common in zip(lengths, shared, strict=True):
        tokens = np.concatenate([preamble[:common], rng.integers(0, 1000, length + 1 - common)]).astype(np.int32)
        last = np.arange(length + 1) == length
        blank = np.zeros(length + 1, np.float32)
        rows.append(TrainingSample(token_ids=tokens, loss_mask=last, logprobs=blank, advantages=blank))
    return rows


def packed(rows: list[TrainingSample]) -> MicroBatch:
    (batch,) = pack(rows, max_tokens=1 << 30)
    return batch


def inputs(count: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    heads = (HEADS, KEY_HEADS, KEY_HEADS)
    return [torch.randn(1, each, count, WIDTH, generator=generator, dtype=dtype).requires_grad_(True) for each in heads]


def visible(batch: MicroBatch, window: int | None) -> Tensor:
    """[N, N], from the paths alone: a token sees what precedes it on the path from the root."""
    count = len(batch.token_ids)
    seen = np.zeros((count, count), np.bool_)
    path: list[int] = []
    for token in range(count):
        position = int(batch.position_ids[token])
        del path[position:]
        path.append(token)
        seen[token, path[-window:] if window else path] = True
    return torch.from_numpy(seen)


def naive(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    repeated = [each.repeat_interleave(HEADS // KEY_HEADS, dim=1) for each in (key, value)]
    out = F.scaled_dot_product_attention(query, *repeated, attn_mask=seen)
    return out.transpose(1, 2)


TREES: dict[str, tuple[list[int], list[int]]] = {
    "one row": ([700], [0]),
    "rows apart": ([300, 20, 280, 5], [0, 0, 0, 0]),
    "a short preamble": ([60, 50, 70, 40, 65] * 4, [30, 30, 20, 30, 0] * 4),
    "a long preamble": ([600, 580, 20, 590], [550, 400, 20, 550]),
}


@pytest.mark.parametrize("window", [None, 17])
@pytest.mark.parametrize("name", TREES)
def test_output_and_gradients_are_those_of_a_mask(
    name: str, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "_MASK", 20_000)
    batch = packed(rows_of(*TREES[name]))
    assert len(TreeAttentionMask(batch, CPU).chunks(window)) > 1 or name == "one row"
    query, key, value = inputs(len(batch.token_ids))
    expected = naive(query, key, value, visible(batch, window))
    weights = torch.randn(expected.shape, dtype=expected.dtype, generator=torch.Generator().manual_seed(2))
    wanted = torch.autograd.grad((expected * weights).sum(), (query, key, value))
    found, _ = tree_attention(
        nn.Module(),
        query,
        key,
        value,
        None,
        sliding_window=window,
        tree=TreeAttentionMask(batch, CPU),
        scaling=WIDTH**-0.5,
    )
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    got = torch.autograd.grad((found * weights).sum(), (query, key, value))
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("window", [None, 17])
@pytest.mark.parametrize("name", TREES)
def test_the_path_for_cuda_gives_the_same_output(name: str, window: int | None) -> None:
    batch = packed(rows_of(*TREES[name]))
    query, key, value = (each.detach() for each in inputs(len(batch.token_ids), torch.float32))
    tree = TreeAttentionMask(batch, CPU)
    found = flex_tree_attention(query, key, value, tree, window, None).transpose(1, 2)
    torch.testing.assert_close(found, naive(query, key, value, visible(batch, window)), rtol=1e-4, atol=1e-5)


def test_attention_leaves_the_filters_of_warnings_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the whole process's: other threads may warn meanwhile."""
    filters, seen = warnings.filters, list[bool]()

    def attention(query: Tensor, *_: object, **__: object) -> Tensor:
        seen.append(warnings.filters is filters)
        return query

    monkeypatch.setattr(forward, "flex_attention", attention)
    batch = packed(rows_of(*TREES[next(iter(TREES))]))
    query, key, value = inputs(len(batch.token_ids), torch.float32)
    flex_tree_attention(query, key, value, TreeAttentionMask(batch, CPU), None, None)
    assert seen == [True]


def test_attention_without_a_compiler_warns_nobody() -> None:
    """Outside pytest, which sets its own filters for each test."""
    script = (
        "import warnings, torch, agentrl.learn.forward\n"
        "from torch.nn.attention.flex_attention import flex_attention\n"
        "warnings.simplefilter('error', UserWarning, append=True)\n"
        "flex_attention(*[torch.zeros(1, 1, 8, 16)] * 3)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False).stderr == ""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for CPUs with g++")
def test_one_compiled_kernel_is_for_all_rows_and_windows() -> None:
    torch.compiler.reset()
    compiled, before = forward._compiled_flex(), counters["stats"]["unique_graphs"]
    for lengths, shared in (([300, 200, 250], [100, 100, 150]), ([700], [0])):
        batch = packed(rows_of(lengths, shared))
        query, key, value = (each.detach() for each in inputs(len(batch.token_ids), torch.float32))
        for window in (None, 64):
            mask = TreeAttentionMask(batch, CPU).block_mask(window)
            with torch.no_grad():
                found = compiled(query, key, value, block_mask=mask, scale=None, enable_gqa=True).transpose(1, 2)
            torch.testing.assert_close(found, naive(query, key, value, visible(batch, window)), rtol=1e-4, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == before + 1


@pytest.mark.parametrize("window", [None, 17])
@pytest.mark.parametrize("name", TREES)
def test_a_block_mask_leaves_no_visible_key_out(name: str, window: int | None) -> None:
    batch = packed(rows_of(*TREES[name]))
    seen, size = visible(batch, window), forward._BLOCK
    count = len(seen)
    mask = TreeAttentionMask(batch, CPU).block_mask(window)
    listed = np.zeros((mask.kv_indices.shape[-1],) * 2, np.int64)
    for kind, (counts, indices) in enumerate(
        [(mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices)], start=1
    ):
        assert counts is not None
        assert indices is not None
        for query in range(len(listed)):
            listed[query, indices[0, 0, query, : int(counts[0, 0, query])]] += kind
    for query in range(len(listed)):
        for key in range(len(listed)):
            part = seen[query * size : min(count, (query + 1) * size), key * size : min(count, (key + 1) * size)]
            assert listed[query, key] in ((1, 2) if part.all() else (1,) if part.any() else (0, 1)), (query, key)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor made inside, views apart."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple | list) else (made,):
            if isinstance(each, Tensor):
                self.elements = max(self.elements, each.untyped_storage().nbytes() // each.element_size())
        return made


def test_nothing_that_is_kept_or_made_grows_with_the_square(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "_MASK", 1 << 14)
    monkeypatch.setattr(forward, "_KEPT_MASKS", 1 << 14)
    kept, largest = [], []
    for length in (300, 600):
        batch = packed(rows_of([length, length], [length // 2, length // 2]))
        query, key, value = inputs(len(batch.token_ids), torch.float32)
        sizes: list[int] = []

        def note(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with Largest() as seen, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            found, _ = tree_attention(nn.Module(), query, key, value, None, tree=TreeAttentionMask(batch, CPU))
            found.sum().backward()
        kept.append(sum(sizes))
        largest.append(seen.elements)
    assert kept[1] <= 2.05 * kept[0]
    assert largest[1] <= 2.05 * largest[0]


def test_what_is_no_causal_softmax_is_refused() -> None:
    batch = packed(rows_of([5], [0]))
    query, key, value = inputs(5)
    tree: Any = TreeAttentionMask(batch, CPU)
    for other in ({"softcap": 30.0}, {"s_aux": query}, {"dropout": 0.1}, {"tree": None}):
        with pytest.raises(ModelError, match="attention"):
            tree_attention(nn.Module(), query, key, value, None, **({"tree": tree} | other))
    with pytest.raises(ModelError):
        tree_attention(nn.Module(), query, key, value[..., :8], None, tree=tree)


def test_long_rows_are_not_padded_so_that_no_mask_grows_with_their_square() -> None:
    lengths = [LONGEST_PADDED + 3, LONGEST_PADDED + 2, LONGEST_PADDED + 3, LONGEST_PADDED, LONGEST_PADDED - 9, 5]
    (batch,) = pack(rows_of(lengths, [0] * len(lengths)), max_tokens=1 << 30, share=False)
    parts = list(padded_rows(batch))
    assert all(valid.all() or valid.shape[1] <= LONGEST_PADDED for _, valid in parts)
    assert [valid.sum(axis=1).tolist() for _, valid in parts] == [
        [LONGEST_PADDED + 3] * 2,
        [LONGEST_PADDED + 2],
        [LONGEST_PADDED, LONGEST_PADDED - 9],
        [5],
    ]
    assert np.array_equal(np.sort(np.concatenate([tokens[valid] for tokens, valid in parts])), np.arange(sum(lengths)))


@pytest.mark.parametrize("window", [17, 200, 300])
def test_blocks_outside_a_window_are_skipped(window: int) -> None:
    mask = TreeAttentionMask(packed(rows_of([2000], [0])), CPU).block_mask(window)
    assert mask.full_kv_num_blocks is not None
    listed = (mask.kv_num_blocks + mask.full_kv_num_blocks)[0, 0]
    assert int(listed.max()) <= -(-window // forward._BLOCK) + 1
    assert int(mask.full_kv_num_blocks.sum()) > 0 or window < 2 * forward._BLOCK


def test_an_error_of_the_attention_kernel_is_reported(tmp_path: Path) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of resource: shared memory, Required: 102400, Hardware limit: 101376")

    episodes = Episodes(make_rows(0, 4))
    trainer = PolicyTrainer(
        run_config(write_model(tmp_path / "model")).trainer_plan, tmp_path / "run", read=episodes.read
    )
    AttentionInterface.register(ATTENTION, fails)
    try:
        lines = trainer.start()
    finally:
        AttentionInterface.register(ATTENTION, tree_attention)
    assert "Required: 102400" in " ".join(lines)
    trainer.forward_backward(episodes.batch())
    assert trainer.optim_step("policy", 1).metrics["shares_prefixes"] == 0


@pytest.mark.parametrize("fault", ["", "sees too little", "does not compile"])
def test_attention_that_is_compiled_for_a_step_is_checked_before_it(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(*arguments: Any, **options: Any) -> tuple[torch.Tensor, None]:
        output, none = tree_attention(*arguments, **options)
        if torch.is_grad_enabled() and fault:
            if fault == "does not compile":
                raise RuntimeError("NoValidChoicesError")
            output = torch.cat([output[:, :9], output[:, 9:] * 0], dim=1)
        return output, none

    episodes = Episodes(make_rows(0, 4))
    trainer = PolicyTrainer(
        run_config(write_model(tmp_path / "model")).trainer_plan, tmp_path / "run", read=episodes.read
    )
    trainer.start()
    monkeypatch.setattr(trainer_module, "compiles_attention", lambda device: True)  # as on CUDA
    AttentionInterface.register(ATTENTION, compiled)
    try:
        with pytest.warns(match="prefixes are not shared, because of") if fault else contextlib.nullcontext():
            trainer.forward_backward(episodes.batch())
    finally:
        AttentionInterface.register(ATTENTION, tree_attention)
    report = trainer.optim_step("policy", 1)
    assert report.metrics["shares_prefixes"] == (not fault)
    unchecked = PolicyTrainer(run_config(tmp_path / "model").trainer_plan, tmp_path / "other", read=episodes.read)
    unchecked.start()
    unchecked.forward_backward(episodes.batch())
    assert report.grad_norm == pytest.approx(unchecked.optim_step("policy", 1).grad_norm, rel=1e-4)


def test_adapters_on_one_base_share_prefixes_all_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be on different layers, and attention is the base's."""
    config = run_config(write_model(tmp_path / "model"))
    policies = {
        name: config.policies["policy"].model_copy(update={"lora": LoraConfig(rank=2, target_modules=[target])})
        for name, target in (("one", "q_proj"), ("two", "up_proj"))
    }
    trainer = PolicyTrainer(config.model_copy(update={"policies": policies}).trainer_plan, tmp_path / "run")
    trainer.start()
    models = {name: learner.model for name, learner in trainer._learners.items()}
    assert {model.shared_prefixes for model in models.values()} == {True}
    assert len({id(model.model) for model in models.values()}) == 1
    monkeypatch.setattr(trainer_module, "compiles_attention", lambda device: True)
    monkeypatch.setattr(trainer_module, "why_compiled_attention_fails", lambda model: "NoValidChoicesError")
    with pytest.warns(match="prefixes are not shared, because of NoValidChoicesError"):
        trainer._prepare(models["one"])
    assert {model.unshared for model in models.values()} == {"NoValidChoicesError"}
    assert models["two"].model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("lengths", "shared", "pays"),
    [
        ([1535] * 4, 1024, True),
        ([4096] * 8, 64, False),  # long rows, of which attention takes the time
        ([4096] * 8, 2048, False),
        ([4096] * 8, 3500, True),
        ([60] * 4, 30, True),
        ([500] * 4, 0, False),
    ],
)
def test_a_tree_is_shared_where_that_is_faster_on_a_card(lengths: list[int], shared: int, pays: bool) -> None:
    rows = rows_of(lengths, [shared] * len(lengths))
    sizes: list[TreeSize] = []

    def choose(size: TreeSize) -> bool:
        sizes.append(size)
        return sharing_pays(size, 1024)

    most = 2 * lengths[0] if not pays else 1 << 30
    batches = list(pack(rows, max_tokens=most, share=choose))
    assert {batch.is_tree for batch in batches} == {pays}
    assert pays or all(len(batch.token_ids) <= most for batch in batches)
    (tree,) = pack(rows, max_tokens=1 << 30)
    trained = {(sample, at) for batch in batches for sample, at in zip(batch.sample, batch.position, strict=True)}
    assert trained == set(zip(tree.sample, tree.position, strict=True))
    if len(batches) == 1:
        assert sizes[0].tree_tokens == len(tree.token_ids)
        assert sizes[0].tree_pairs == (tree.position_ids + 1).sum()
        assert sizes[0].row_tokens == sum(lengths)
        assert sizes[0].row_pairs == sum(length * (length + 1) // 2 for length in lengths)


def test_a_step_shares_some_prefixes_and_not_others(tmp_path: Path) -> None:
    rows = [*make_rows(0, 4, prefix=1, longest=60), *make_rows(1, 4, prefix=60, longest=20)]
    episodes = Episodes(rows)
    path = write_model(tmp_path / "model")
    reports = []
    for chooses in (False, True):
        config = run_config(path, micro_batch_tokens=180)
        trainer = PolicyTrainer(config.trainer_plan, tmp_path / f"run {chooses}", read=episodes.read)
        trainer.start()
        model = trainer._learners["policy"].model
        model.chooses_sharing = chooses  # as on CUDA
        trainer.forward_backward(episodes.batch())
        reports.append(trainer.optim_step("policy", 1))
    always, chosen = reports
    assert always.metrics["shares_prefixes"] == 1
    assert 0 < chosen.metrics["shares_prefixes"] < 1
    assert chosen.grad_norm == pytest.approx(always.grad_norm, rel=1e-4)


def test_padded_rows_are_used_on_a_card_only_if_they_are_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    episodes = Episodes(make_rows(0, 4))
    path = write_model(tmp_path / "model")
    for fault in (False, True):
        trainer = PolicyTrainer(run_config(path).trainer_plan, tmp_path / f"run {fault}", read=episodes.read)
        trainer.start()
        monkeypatch.setattr(trainer_module, "compiles_attention", lambda device: True)  # as on CUDA
        original = AttentionInterface()["sdpa"]

        def attend(*arguments: Any, original: Any = original, fault: bool = fault, **options: Any) -> Any:
            output, weights = original(*arguments, **options)
            return output * (0.0 if fault else 1.0), weights

        AttentionInterface.register("sdpa", attend)
        try:
            trainer.forward_backward(episodes.batch())
        finally:
            AttentionInterface.register("sdpa", original)
        assert trainer._learners["policy"].model.chooses_sharing is not fault


def test_the_start_says_that_prefixes_are_shared(tmp_path: Path) -> None:
    trainer = PolicyTrainer(run_config(write_model(tmp_path / "model")).trainer_plan, tmp_path / "run")
    assert "computed once" in " ".join(trainer.start())


@pytest.mark.parametrize("width", [64, 128, 256])
def test_kernels_are_made_smaller_for_cards_with_little_shared_memory(width: int) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        own_sizes = flex_options(width, dtype, 166_912).keys() == {"FORCE_USE_FLEX_ATTENTION"}
        assert own_sizes == (dtype != torch.float32 or width <= 128)
        options = flex_options(width, dtype, 101_376)
        assert all(forward._BLOCK % size == 0 for name, size in options.items() if "BLOCK" in name)
