"""The nodes of a prefix tree, of which recurrent layers compute each from its parent's state."""

from __future__ import annotations

import numpy as np
import torch

from agentrl.learn.packing import pack, tree_nodes
from agentrl.learn.recurrence import RecurrencePlan
from tests.learn_cases import make_samples


def test_every_token_is_in_one_node_behind_its_predecessor() -> None:
    for seed in range(20):
        samples = make_samples(seed, 9)
        for batch in pack(samples, max_tokens=60):
            nodes = tree_nodes(batch)
            assert [node.start for node in nodes] == [0, *(node.stop for node in nodes[:-1])]
            assert nodes[-1].stop == len(batch.token_ids)
            previous = np.full(len(batch.token_ids), -1)
            for node in nodes:
                previous[node.start : node.stop] = np.arange(node.start, node.stop) - 1
                previous[node.start] = nodes[node.parent].stop - 1 if node.parent >= 0 else -1
            for token, before in enumerate(previous):
                assert batch.position_ids[token] == (batch.position_ids[before] + 1 if before >= 0 else 0)
                assert before < 0 or token < batch.visible_until[before]


def test_a_plan_places_every_token_once() -> None:
    for seed in range(20):
        (batch,) = pack(make_samples(seed, 9), max_tokens=1 << 20)
        plan = RecurrencePlan(batch, torch.device("cpu"))
        computed = torch.cat([block.tokens.flatten() for block in plan.blocks])
        assert computed[plan.place].tolist() == list(range(len(batch.token_ids)))
        for number, block in enumerate(plan.blocks):
            assert len(block.parents) in (0, len(block.tokens))
            assert all(parent < min(number, plan.num_inner) for parent in block.parents)
            assert block.tokens.shape[1] > 1
