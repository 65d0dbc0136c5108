"""What the ranks of a group say to each other, on each device there is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from agentrl.learn.ranks import ProcessGroup


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"))],
)
def test_tensors_of_the_host_and_empty_messages_pass_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    group = ProcessGroup(tmp_path / "rendezvous", rank=0, size=1, device=torch.device(device))
    try:
        totals = torch.tensor([1.5, 2.5], dtype=torch.float64)
        group.sum([totals, torch.ones(2, 2, dtype=torch.float64, device=device)])
        assert totals.tolist() == [1.5, 2.5]
        assert group.gather(b"") == [b""]
        assert group.gather(b"columns") == [b"columns"]
    finally:
        group.close()
