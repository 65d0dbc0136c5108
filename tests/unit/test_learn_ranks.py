"""What the ranks of a group say to each other, on each device there is."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from agentrl.cluster import trainer_pool
from agentrl.core.errors import TrainerLostError
from agentrl.learn import ranks
from agentrl.learn.ranks import DistributedRankGroup, Rendezvous, balanced_shares, buckets, serve_rendezvous
from tests.support.warm import WARM


@pytest.fixture
def _restored_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")


@pytest.mark.usefixtures("_restored_interfaces")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_tensors_of_the_host_and_empty_messages_pass_through(device: str) -> None:
    rendezvous, store = serve_rendezvous("127.0.0.1")
    group = DistributedRankGroup(rendezvous, rank=0, device=torch.device(device), addresses=["127.0.0.1"], store=store)
    try:
        totals = torch.tensor([1.5, 2.5], dtype=torch.float64)
        group.sum([totals, torch.ones(2, 2, dtype=torch.float64, device=device)])
        assert totals.tolist() == [1.5, 2.5]
        assert group.gather(b"") == [b""]
        assert group.gather(b"columns") == [b"columns"]
    finally:
        group.close()


SHAPES = ((2, 3), (4,), (40,), (1,), (5, 2), ())
"""Gradients of 24, 16, 160, 4, 40 and 4 bytes."""
SMALL_BUCKET = 48


def gradients_of(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def sum_as_rank_1(rendezvous: Rendezvous) -> None:
    ranks.BUCKET = SMALL_BUCKET
    group = DistributedRankGroup(rendezvous, rank=1, device=torch.device("cpu"), addresses=["127.0.0.1"] * 2)
    group.sum(gradients_of(1))
    group.close()


@pytest.mark.usefixtures("_restored_interfaces")
def test_sums_in_several_buckets_equal_the_sum_of_each_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """One tensor is larger than a bucket."""
    monkeypatch.setattr(ranks, "BUCKET", SMALL_BUCKET)
    gradients = gradients_of(0)
    assert [[each.nbytes for each in bucket] for bucket in buckets(gradients)] == [[24, 16], [160], [4, 40, 4]]
    rendezvous, store = serve_rendezvous("127.0.0.1")
    other = WARM.Process(target=sum_as_rank_1, args=(rendezvous,))
    other.start()
    group = DistributedRankGroup(
        rendezvous, rank=0, device=torch.device("cpu"), addresses=["127.0.0.1"] * 2, store=store
    )
    try:
        group.sum(gradients)
        expected = [first + second for first, second in zip(gradients_of(0), gradients_of(1), strict=True)]
        assert all(torch.equal(summed, each) for summed, each in zip(gradients, expected, strict=True))
    finally:
        group.close()
        other.join()
    assert other.exitcode == 0


@pytest.mark.parametrize(
    ("sizes", "ranks", "largest"),
    [
        ([9, 1, 1, 1], 2, 9),
        ([1, 1, 1, 9], 2, 9),
        ([5, 5, 5, 5], 2, 10),
        ([3, 4, 5, 6, 7], 3, 11),
        ([4], 3, 4),
        ([], 2, 0),
    ],
)
def test_shares_are_balanced_by_size_and_make_up_the_whole(sizes: list[int], ranks: int, largest: int) -> None:
    shares = balanced_shares(sizes, ranks)
    assert len(shares) == ranks
    assert [at for share in shares for at in share] == list(range(len(sizes)))
    assert max(sum(sizes[at] for at in share) for share in shares) == largest


def test_a_group_with_a_lost_host_is_lost_although_other_ranks_still_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost group resumes by itself; any other error ends the run."""
    from ray.exceptions import RayTaskError

    monkeypatch.setattr(trainer_pool, "PATIENCE_S", 0.01)
    ended: list[str] = []
    pool = SimpleNamespace(
        _death_cause=lambda: None,
        _kill_actors=lambda: ended.append("group"),
        _rank_label=str,
        _trainer_plan=SimpleNamespace(trainer=SimpleNamespace(ranks=2)),
    )
    error = RayTaskError("forward_backward", "", TrainerLostError("host b has left"))

    async def settle() -> None:
        waiting = asyncio.get_running_loop().create_future()
        await trainer_pool.RayTrainerPool._settle(pool, 1, "forward_backward", error, {waiting})  # type: ignore[arg-type]

    with pytest.raises(TrainerLostError, match=r"rank 1 was lost in forward_backward: .*host b has left"):
        asyncio.run(settle())
    assert ended == ["group"]


@pytest.mark.usefixtures("_restored_interfaces")
def test_a_rank_that_does_not_come_is_named_with_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranks.JOIN_TIMEOUT.total_seconds() <= 60
    monkeypatch.setattr(ranks, "JOIN_TIMEOUT", timedelta(seconds=0.5))
    rendezvous, store = serve_rendezvous("127.0.0.1")
    addresses = ["127.0.0.1", "10.78.0.2", "10.78.0.3"]
    store.set("present/1", addresses[1])
    with pytest.raises(TrainerLostError, match="rank 2"):
        DistributedRankGroup(rendezvous, rank=0, device=torch.device("cpu"), addresses=addresses, store=store)
