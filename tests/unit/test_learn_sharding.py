"""Ranks that hold shards of the weights (FSDP2, gloo): the same update, files for any number of ranks, less memory."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from agentrl.core.errors import ModelError
from agentrl.engines.models import read_meta_model, read_model
from agentrl.learn.memory_prediction import AllocationCounter
from tests.learn_cases import run_config, write_model
from tests.model_families import write_family
from tests.rank_processes import on_ranks
from tests.sharding_cases import FUNCTION, alone, case, gradient_error

pytestmark = pytest.mark.timeout(900)

QUICK = {
    *(
        "all weights",
        "all weights, replicated",
        "all weights, offloaded",
        "adapters of two policies",
    ),
    *("a loss of whole steps", "over sequences", "experts", "recorded experts", "a silent step", "unused weights"),
}
"""Cases that `make test` computes; `make test-all` computes all."""


def cases(root: Path, ranks: int) -> dict[str, dict[str, Any]]:
    def made(name: str, model: str = "qwen3", **settings: Any) -> dict[str, Any]:
        return case(root / model, root / name / str(ranks), **settings)

    return {
        "all weights": made("all"),
        "all weights, replicated": made("replicated", sharding="none"),
        "adapters of two policies": made("adapters", lora=True, policies=("policy", "other"), recompute=True),
        "adapters and their base": made("reference", lora=True, loss={"name": "ppo", "kl": 0.1}),
        "a loss of whole steps": made("step", lora=True, loss={"name": "tests.sharding_cases:spread", "kl": 0.1}),
        "a teacher": made("teacher", reference=root / "teacher", loss={"name": "distillation"}),
        "a teacher of whole steps": made(
            "teacher step", lora=True, reference=root / "teacher", loss={"name": "tests.sharding_cases:concentrated"}
        ),
        "over sequences": made("over sequences", lora=True, loss={"normalizer": "sequences"}),
        "experts": made("experts", "moe"),
        "recorded experts": made("recorded", "moe", routed=True),
        "recorded experts, recomputed": made("recorded recomputed", "moe", routed=True, recompute=True),
        "recorded experts, adapters": made("recorded adapters", "moe", routed=True, lora=True),
        "unused weights": made("unused", steps=3, unused="up_proj.weight"),
        "a silent step": made("silent", steps=3, silent=[2]),
        "a silent step, adapters": made("silent adapters", lora=True, steps=3, silent=[2]),
        "a silent step, experts": made("silent experts", "moe", steps=3, silent=[2]),
        "a silent step, whole steps": made("silent step", steps=3, silent=[2], loss={"name": "gspo"}),
        "a silent step, a divergence": made("pulled", lora=True, steps=3, silent=[2], loss={"name": "ppo", "kl": 0.1}),
        "bfloat16": made("bfloat16", "bfloat16"),
        "for images and text, adapters": made("images adapters", "images", lora=True, recompute=True),
        "adapters on bfloat16": made("adapters on bfloat16", "bfloat16", lora=True),
        "all weights, offloaded": made("offloaded", sharding="offload"),
        "adapters, offloaded": made("offloaded adapters", lora=True, sharding="offload"),
        "bfloat16, offloaded": made("offloaded bfloat16", "bfloat16", sharding="offload"),
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sharding")
    for kind in ("qwen3", "moe"):
        write_model(root / kind, kind=kind)
    write_family("Qwen3.5, 3.6", root / "images")
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(root / "qwen3", dtype=torch.bfloat16).save_pretrained(root / "bfloat16")
    teacher = AutoModelForCausalLM.from_pretrained(root / "qwen3")
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for parameter in teacher.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    teacher.save_pretrained(root / "teacher")
    return root


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, root: Path) -> dict[str, list[dict[str, Any]]]:
    """Results of the cases that the session's tests name as parameters: on one rank, then on each of two."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    names = {*QUICK, *(value for item in items for value in item.callspec.params.values())}
    one, two = ({name: each for name, each in cases(root, ranks).items() if name in names} for ranks in (1, 2))
    every = on_ranks(2, FUNCTION, list(two.values()))
    found = zip(alone(list(one.values())), *every, strict=True)
    return dict(zip(one, map(list, found), strict=True))


def named(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.exhaustive) for name in names]


SILENT = [name for name in cases(Path(), 1) if name.startswith("a silent step")]
LATER = [*SILENT, "unused weights"]
"""Cases of several steps, in which float32 differs more."""


def test_recorded_experts_are_those_that_train(root: Path, results: dict[str, list[dict[str, Any]]]) -> None:
    """The model chooses others by itself, so a step that ignored them would be far off."""
    assert results["recorded experts"]
    by_itself, recorded = (Path(cases(root, 1)[name]["directory"]) for name in ("experts", "recorded experts"))
    assert gradient_error(by_itself, recorded) > 0.1


@pytest.mark.parametrize("name", named(name for name in cases(Path(), 1) if name not in LATER))
def test_two_ranks_give_the_update_of_one(root: Path, results: dict[str, list[dict[str, Any]]], name: str) -> None:
    one, *two = results[name]
    rounded = "bfloat16" in name
    bound = 2e-2 if rounded else 3e-6
    error = gradient_error(*(Path(cases(root, ranks)[name]["directory"]) for ranks in (2, 1)))
    assert error <= bound
    for each in two:
        assert each["losses"] == pytest.approx(one["losses"], abs=1e-2 if rounded else 1e-6)
        assert each["norms"] == two[0]["norms"]
        assert each["norms"] == pytest.approx(one["norms"], rel=2e-2 if rounded else 1e-6)
    for policy in one["versions"]:
        (mine,), (other,) = (list(Path(each["versions"][policy]).glob("*.safetensors")) for each in (two[0], one))
        found, expected = load_file(mine), load_file(other)
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            assert found[key].dtype == tensor.dtype
            # AdamW's first step is as long as the learning rate wherever the gradient is not 0; where it is about as
            # small as epsilon, rounding changes the step.
            close = torch.isclose(found[key], tensor, rtol=2e-2, atol=2e-2 if rounded else 1e-5)
            assert close.logical_not().sum() <= len(close) // 16
            assert (found[key] - tensor).abs().max() < 2.1e-2, "no more than two learning rates"


@pytest.mark.parametrize("name", named(SILENT))
def test_a_step_without_signal_moves_nothing(results: dict[str, list[dict[str, Any]]], name: str) -> None:
    """The step before it leaves momentum; a divergence from the reference is a signal."""
    one, *_ = results[name]
    pulled = name == "a silent step, a divergence"
    assert [moved > 0 for moved in one["moved"]] == [True, pulled, True]
    assert one["zero_gradients"] == [0.0, float(not pulled), 0.0]


@pytest.mark.parametrize("name", named(LATER))
def test_steps_after_one_with_fewer_gradients_are_those_of_one_rank(
    results: dict[str, list[dict[str, Any]]], name: str
) -> None:
    one, *two = results[name]
    for each in two:
        assert each["moved"] == pytest.approx(one["moved"], rel=1e-4)
        assert each["zero_gradients"] == one["zero_gradients"]
    (mine,), (other,) = (list(Path(each["versions"]["policy"]).glob("*.safetensors")) for each in (two[0], one))
    found, expected = load_file(mine), load_file(other)
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=2e-2, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        *("all weights", "adapters of two policies"),
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("all weights, offloaded", "values", "experts")),
    ],
)
def test_a_checkpoint_of_two_ranks_is_resumed_by_one(
    root: Path, results: dict[str, list[dict[str, Any]]], name: str
) -> None:
    settings = {key: cases(root, 1)[name][key] for key in ("lora", "policies", "credit")}
    model = Path(cases(root, 1)[name]["model"])
    whole, resumed = alone(
        [
            case(model, root / name / "undisturbed", steps=2, **settings),
            case(model, root / name / "resumed", first=2, resume_from=results[name][1]["checkpoint"], **settings),
        ]
    )
    assert resumed["losses"] == pytest.approx(whole["losses"][-len(resumed["losses"]) :], abs=1e-6)
    assert resumed["norms"] == pytest.approx(whole["norms"][-len(resumed["norms"]) :], rel=1e-5)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_checkpoints_go_from_two_ranks_to_four_in_groups_of_two_and_to_one(
    root: Path, results: dict[str, list[dict[str, Any]]]
) -> None:
    model, saved = root / "qwen3", results["all weights"][1]["checkpoint"]
    (whole,) = alone([case(model, root / "four" / "undisturbed", steps=3)])
    every = on_ranks(4, FUNCTION, [case(model, root / "four" / "4", first=2, resume_from=saved, sharding=2)])
    four = every[0]
    (one,) = alone([case(model, root / "four" / "1", first=3, resume_from=four[0]["checkpoint"])])
    losses = results["all weights"][1]["losses"] + four[0]["losses"] + one["losses"]
    whole_bytes = sum(file.stat().st_size for file in Path(saved).rglob("*.*"))
    assert all(each["read"] < 0.6 * whole_bytes for (each,) in every), "each reads the rows that it holds"
    assert losses == pytest.approx(whole["losses"], abs=1e-6)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_adapters_in_groups_of_two_of_four_ranks_have_the_gradient_of_one(root: Path, tmp_path: Path) -> None:
    def made(name: str, **settings: Any) -> dict[str, Any]:
        return case(root / "qwen3", tmp_path / name, lora=True, **settings)

    alone([made("one")])
    on_ranks(4, FUNCTION, [made("four", sharding=2)])
    assert gradient_error(tmp_path / "four", tmp_path / "one") <= 1e-5


def test_each_rank_holds_its_part_alone(results: dict[str, list[dict[str, Any]]]) -> None:
    for name in ("all weights", "adapters of two policies", "experts"):
        one, *two = results[name]
        assert max(each["bytes"] for each in two) <= 0.55 * one["bytes"]
    one, *two = results["all weights, replicated"]
    assert [each["bytes"] for each in two] == [one["bytes"]] * 2


@pytest.mark.parametrize(
    ("name", "offloaded"),
    [
        ("all weights", "all weights, offloaded"),
        pytest.param("bfloat16", "bfloat16, offloaded", marks=pytest.mark.exhaustive),
    ],
)
def test_an_offloaded_rank_gives_the_files_of_one_that_is_not(
    results: dict[str, list[dict[str, Any]]], name: str, offloaded: str
) -> None:
    for one, other in zip(results[name], results[offloaded], strict=True):
        assert one["losses"] == other["losses"]
        files = [Path(each["versions"]["policy"]) / "model.safetensors" for each in (one, other)]
        assert files[0].read_bytes() == files[1].read_bytes()


def half(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach()[: len(parameter) // 2].clone())


def test_a_tensor_is_cut_before_the_next_is_read(root: Path) -> None:
    shapes = sum(
        each.nbytes for each in read_meta_model(root / "qwen3", max_context=64, dtype=torch.bfloat16).parameters()
    )
    kept: list[nn.Parameter] = []

    def cut(parameter: nn.Parameter) -> nn.Parameter:
        alive = counted.live - shapes - sum(each.nbytes for each in kept)
        assert parameter.nbytes <= alive <= parameter.nbytes + 4096, "this tensor, and a few positions"
        kept.append(half(parameter))
        return kept[-1]

    with AllocationCounter() as counted:
        model = read_model(root / "qwen3", dtype=torch.bfloat16, max_context=64, to_sample=False, keep=cut)
    assert {id(each) for each in model.parameters()} == {id(each) for each in kept}
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight, "tied"


@pytest.mark.parametrize("fault", ["missing", "shape"])
def test_shards_of_a_damaged_checkpoint_are_not_made_up(root: Path, tmp_path: Path, fault: str) -> None:
    shutil.copytree(root / "qwen3", tmp_path / "model")
    file = tmp_path / "model/model.safetensors"
    tensors, name = load_file(file), "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name][:-1].clone()
    if fault == "missing":
        del tensors[name]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelError, match=rf"{fault} .*{name}"):
        read_model(tmp_path / "model", dtype=torch.bfloat16, max_context=64, to_sample=False, keep=half)


def test_groups_that_do_not_divide_the_ranks_are_refused(root: Path) -> None:
    with pytest.raises(ValueError, match=r"sharding = 2.*ranks = 3"):
        run_config(root / "qwen3", ranks=3, sharding=2)
