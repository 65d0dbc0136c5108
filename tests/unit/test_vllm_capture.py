"""The experts of a call that several requests to vLLM made, as the trainer gets them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from agentrl.core.errors import EngineError
from agentrl.core.tokens import ExpertRouting, ExpertRoutingRestart
from agentrl.engines.vllm.capture import CallRouting, RoutedContext

OLD, NEW = "old", "new"
CONTEXT = np.arange(10, dtype=np.int32)


def returned(first: int, count: int) -> Any:
    """Rows of two layers, of which the second has experts; each position names itself. As vLLM's, they have two bytes
    if one does not suffice."""
    rows = np.stack([np.zeros(count), np.arange(first, first + count)], axis=1)
    return SimpleNamespace(routed_experts=rows[:, :, None].astype(np.min_scalar_type(first + count - 1)))


def routing(before: RoutedContext | None = None) -> CallRouting:
    return CallRouting([1], CONTEXT, before)


@pytest.mark.parametrize(("last", "kind"), [(255, np.uint8), (256, np.uint16)])
def test_more_than_256_experts_take_two_bytes(last: int, kind: Any) -> None:
    call = CallRouting([1], np.arange(300, dtype=np.int32))
    call.append(returned(last - 3, 4), 0, 4, NEW)
    experts = call.experts()
    assert experts is not None
    assert experts.rows.dtype == kind
    assert ExpertRouting.decode(experts.encode(), plain=False).rows[:, 0, 0].tolist() == [*range(last - 3, last + 1)]


def test_one_request_returns_the_layers_with_experts() -> None:
    call = routing()
    assert call.start_of_request(OLD) == 0
    call.append(returned(0, 14), 0, 12, OLD)  # two tokens were withdrawn
    experts = call.experts()
    assert experts is not None
    assert experts.rows.shape == (12, 1, 1)
    assert experts.rows[:, 0, 0].tolist() == [*range(12)]
    assert (experts.start, experts.restarts) == (0, ())


def test_the_same_version_continues_and_another_begins_again() -> None:
    call = routing()
    call.append(returned(0, 12), 0, 12, OLD)
    assert call.start_of_request(OLD) == 12
    call.append(returned(12, 3), 12, 15, OLD)
    assert call.start_of_request(NEW) == 0
    call.append(returned(0, 20), 0, 20, NEW)
    experts = call.experts()
    assert experts is not None
    assert experts.restarts == (ExpertRoutingRestart(15, 0),)
    assert experts.rows[:, 0, 0].tolist() == [*range(15), *range(20)]
    known = call.after(np.arange(21, dtype=np.int32))
    assert known is not None
    assert (known.computed_by, len(known.token_ids)) == (NEW, 20)


def test_a_context_computed_by_two_versions_is_routed_again() -> None:
    call = routing()
    call.append(returned(0, 12), 0, 12, None)
    assert [call.start_of_request(version) for version in (OLD, NEW)] == [0, 0]


@pytest.mark.parametrize(
    ("tokens", "version", "start"),
    [
        (CONTEXT[:6], OLD, 6),
        (CONTEXT[:6], NEW, 0),
        (CONTEXT, OLD, 9),  # its last position is computed in any case
        (np.array([0, 1, 2, 9], np.int32), OLD, 3),
        (np.arange(30, dtype=np.int32), OLD, 9),
    ],
)
def test_a_turn_returns_what_earlier_turns_did_not(tokens: Any, version: str, start: int) -> None:
    assert routing(RoutedContext(OLD, tokens)).start_of_request(version) == start


def test_a_call_without_rows_leaves_what_is_known() -> None:
    known = RoutedContext(OLD, CONTEXT[:6])
    call = routing(known)
    call.append(SimpleNamespace(routed_experts=None), 6, 12, OLD)  # type: ignore[arg-type]
    assert call.experts() is None
    assert call.after(CONTEXT) is known


def test_missing_rows_are_an_error() -> None:
    with pytest.raises(EngineError, match="experts"):
        routing().append(returned(0, 3), 0, 12, OLD)
