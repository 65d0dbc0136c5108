"""Sends weights to an engine on this machine as files, in the place of `ipc` and `nccl`, which need GPUs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import save_file

from agentrl.engines.weights.senders import (
    PublishedWeightSource,
    WeightDestination,
    WeightTransferConnection,
    in_chunks,
)


class FileSender:
    """Writes the tensors before the engine pauses, and drives vLLM's protocol as its trainer engines do."""

    def __init__(
        self, recipient: WeightDestination, link: WeightTransferConnection, source: PublishedWeightSource
    ) -> None:
        self.link = link
        self.source = source
        self._directory = tempfile.TemporaryDirectory()

    def send_weights(self) -> None:
        files = list(self._written())
        self.link.start_weight_update()
        for file in files:
            self.link.update_weights({"path": str(file), "is_last": file is files[-1]})
        self.link.finish_weight_update()

    def _written(self) -> Iterator[Path]:
        for number, chunk in enumerate(in_chunks(self.source)):
            path = Path(self._directory.name, f"{number}.safetensors")
            save_file(chunk, path)
            yield path

    def shutdown(self) -> None:
        self._directory.cleanup()
