"""The bytes of the Tinker protocol, as its SDK 0.38 wrote them; and bytes that are none."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from agentrl.core.records import FinishReason, PolicyVersion, VersionSpan
from agentrl.core.tokens import Completion
from agentrl_tinker import messages
from agentrl_tinker.errors import RequestRefusedError
from packages.tinker.tests.client import Samples, decoded_pass, encode_forward_backward, encode_tensor

OF_THE_SDK = bytes.fromhex(
    "0a09733a747261696e3a3010ac021a88010a100a0e0a0c05000000060000000700000012210a0a616476616e746167657312130a0c0000803f"
    "00000000000000c01801220103121f0a086c6f6770726f627312130a0c0000c0bf00000000000080be180122010312300a0d7461726765745f"
    "746f6b656e73121f0a18060000000000000007000000000000002c0100000000000018022201031a2c0a080a060a040900000012200a0d7461"
    "726765745f746f6b656e73120f0a0801000000000000001802220101220370706f2a1d0a12636c69705f6c6f775f7468726573686f6c641166"
    "6666666666e63f30013a1f0a12636c69705f6c6f775f7468726573686f6c64120909666666666666e63f"
)
"""A request of two datums, 3 tokens and 1 token, for a forward pass with the loss `ppo` and one setting."""
TWO_DIMENSIONS = bytes.fromhex(
    "0a016d10011a490a0c0a0a0a08050000000600000012390a0d7461726765745f746f6b656e7312280a20010000000000000002000000000000"
    "0003000000000000000400000000000000180222020202220d63726f73735f656e74726f7079"
)


def test_a_pass_is_read_as_the_sdk_writes_it() -> None:
    request = messages.read_forward_backward(OF_THE_SDK)
    assert (request.model_id, request.seq_id, request.loss_fn) == ("s:train:0", 300, "ppo")
    assert (request.settings, request.forward_only) == ({"clip_low_threshold": 0.7}, True)
    first, second = request.rows
    assert first.token_ids.tolist() == [5, 6, 7]
    assert first.targets.tolist() == [6, 7, 300]
    assert {name: column.tolist() for name, column in first.columns.items()} == {
        "logprobs": [-1.5, 0.0, -0.25],
        "advantages": [1.0, 0.0, -2.0],
    }
    assert (second.token_ids.tolist(), second.targets.tolist()) == ([9], [1])


def sampled(token_ids: list[int], logprobs: list[float], reason: FinishReason) -> Completion:
    return Completion(
        token_ids=np.array(token_ids, np.int32),
        logprobs=np.array(logprobs, np.float32),
        spans=(VersionSpan(0, len(token_ids), PolicyVersion("m", 0, 0)),),
        finish_reason=reason,
    )


def test_answers_have_the_bytes_that_the_sdk_reads() -> None:
    """The SDK decoded exactly these bytes; `packages/tinker/tests/test_server_processes.py` runs the installed one."""
    logprobs = [np.array([-1.0, -2.0], np.float32), np.array([-0.5], np.float32)]
    written = messages.write_forward_backward(logprobs, {"loss:sum": 2.5})
    assert written.hex() == (
        "0a0b41727261795265636f7264123a12360a086c6f6770726f6273122a0a0c000080bf000000c0000000bf121800000000000000000800"
        "0000000000000c00000000000000180118021a130a086c6f73733a73756d110000000000000440"
    )
    rows, loss = decoded_pass(written)
    assert ([row.tolist() for row in rows], loss) == ([[-1.0, -2.0], [-0.5]], 2.5)
    samples = messages.write_samples(
        [
            sampled([5, 300], [-1, -0.5], "length"),
            sampled([7], [-0.25], "stop"),
        ],
        [None, None],
        np.array([np.nan, -3], np.float32),
        None,
        [None, None],
    )
    assert samples.hex() == (
        "0a1608011208050000002c0100001a08000080bf000000bf0a0c1204070000001a04000080be12080000c07f000040c0"
    )
    assert Samples(samples).tokens == [[5, 300], [7]]


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (TWO_DIMENSIONS, "a tensor of 2 dimensions"),
        (OF_THE_SDK[:-4], "not a protocol buffer"),
        (b"\x80" * 20, "not a protocol buffer"),
        (b"\x0b", "not a protocol buffer"),
        (encode_forward_backward("m", 1, [], "x").replace(b"\x0a\x01m", b"\x0a\x01\xff"), "not a protocol buffer"),
        (
            encode_forward_backward("m", 1, [{"tokens": [1], "target_tokens": encode_tensor([1])[:-5]}], "x"),
            "not a tensor of 32-bit floats or of integers",
        ),
    ],
)
def test_a_malformed_pass_is_refused(body: bytes, sentence: str) -> None:
    with pytest.raises(RequestRefusedError, match=sentence):
        messages.read_forward_backward(body)


def test_damaged_bytes_are_read_or_refused() -> None:
    for seed in range(200):
        random = np.random.default_rng(seed)
        body = bytearray(OF_THE_SDK)
        for place in random.integers(0, len(body), 3):
            body[place] = random.integers(256)
        with contextlib.suppress(RequestRefusedError):
            messages.read_forward_backward(bytes(body[: random.integers(1, len(body) + 1)]))


def test_what_is_not_served_is_refused_by_name_unless_it_is_empty() -> None:
    sample = {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
        "sampling_params": {"max_tokens": 1, "stop": ["a", 2]},
        "sampling_session_id": "s",
        "seq_id": 0,
        "type": "sample",
        "prompt_alt_tokens_k": 0,
        "record_stability_info": False,
    }
    assert messages.read_json(sample, messages.Sample).sampling_params.stop == ["a", 2]
    with pytest.raises(RequestRefusedError, match="prompt_alt_tokens_k is not served here"):
        messages.read_json({**sample, "prompt_alt_tokens_k": 3}, messages.Sample)
    with pytest.raises(RequestRefusedError, match=r"sampling_params\.beams is not served"):
        messages.read_json({**sample, "sampling_params": {"beams": 4}}, messages.Sample)
    with pytest.raises(RequestRefusedError, match="seq_id"):
        messages.read_json({**sample, "seq_id": "one"}, messages.Sample)
