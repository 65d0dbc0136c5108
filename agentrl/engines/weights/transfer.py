"""Transfer of full weights from the trainer to an engine: the road, and the messages between its two ends.

An engine asks its owner for full weights (`protocol.WeightsRequest`). The owner makes rank 0 of the trainer send the
file it published, while training continues. Rank 0 connects to the engine's Unix socket or, on another machine, to its
TCP port with a token, offers names, dtypes and shapes, and drives vLLM's protocol over the connection: init, start,
update once or more, finish. `transports.py` has the table of transports that carry the bytes, and the choice among
them. Elsewhere the engine loads the published file.

| process | module |
|---|---|
| engine | `receiver.py`; in vLLM's workers `vllm_worker.py` and the receivers of the transports |
| rank 0 of the trainer | `senders.py` and the senders of the transports |
| the engine's owner | `version_files.py`, which sends files to engines on other machines |

Invariant: if no weights are sent, because the trainer has moved on, is dead or cannot be reached, the engine loads the
published file with the same weights, on another machine after its owner has sent it. Each wait has a limit:
`receiver.OFFER_S` for an offer, `WeightOffer.silence_s` for the trainer's next call, at most `senders.ANSWER_S` for the
engine's answer, and `gloo.STALL_S` for a tensor by `gloo`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from agentrl.core import rpc
from agentrl.core.records import PolicyVersion

if TYPE_CHECKING:
    from torch import Tensor


class WeightOffer(rpc.WireMessage, frozen=True, tag="Offer"):
    """The tensors of a version, in the order in which they will be sent."""

    version: PolicyVersion
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    silence_s: float
    """Seconds without a call after which the trainer counts as hung."""

    def tensors(self) -> dict[str, Tensor]:
        """Return tensors without data, by name.

        Raises:
            ValueError: the lists do not describe tensors.
        """
        import torch

        descriptions = zip(self.names, self.dtype_names, self.shapes, strict=True)
        dtypes = {name: getattr(torch, name, None) for name in set(self.dtype_names)}
        if wrong := [name for name, dtype in dtypes.items() if not isinstance(dtype, torch.dtype)]:
            raise ValueError(f"{wrong[0]!r} is not a dtype")
        return {name: torch.empty(shape, dtype=dtypes[dtype], device="meta") for name, dtype, shape in descriptions}


class TransferCall(rpc.WireMessage, frozen=True):
    """A call of vLLM's protocol."""

    method: Literal["init", "start", "update", "finish"]
    info: dict[str, Any]


class TransferReply(rpc.Reply, frozen=True):
    """Answer to a `WeightOffer` or a `TransferCall`; the engine answers one before the trainer sends the next."""


REQUEST_DECODER: msgspec.msgpack.Decoder[WeightOffer | TransferCall] = msgspec.msgpack.Decoder(
    WeightOffer | TransferCall
)
REPLY_DECODER: msgspec.msgpack.Decoder[TransferReply | rpc.ErrorReply] = msgspec.msgpack.Decoder(
    TransferReply | rpc.ErrorReply
)
