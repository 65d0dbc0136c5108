"""A transfer of merged weights to vLLM for TRL 1.16's asynchronous trainer, whose own needs NCCL and so a GPU.

It implements TRL's `WeightTransferProtocol`: the weights go through a file, which vLLM loads in place.
"""

from pathlib import Path

import requests
from safetensors.torch import save_file
from trl.experimental.async_grpo.vllm_client import VLLMClient


class MergedWeights:
    """Weights with the adapter merged, which TRL streams at each publication."""

    def __init__(self, server, directory):
        self.client = VLLMClient(server)
        self.directory = Path(directory)
        self.pause, self.resume = self.client.pause, self.client.resume

    def init_weight_transfer(self):
        """Wait for the server, which may still be loading."""
        self.client.wait_for_server_ready()
        self.directory.mkdir(exist_ok=True)

    def send_weights(self, iterator):
        """Called between `pause`, which drops vLLM's cached keys and values, and `resume`."""
        save_file({name: tensor.contiguous() for name, tensor in iterator}, self.directory / "model.safetensors")
        call = {"method": "reload_weights", "kwargs": {"weights_path": str(self.directory)}}
        requests.post(f"{self.client.server_url}/collective_rpc", json=call, timeout=600).raise_for_status()

    def destroy(self):
        """Nothing to release."""
