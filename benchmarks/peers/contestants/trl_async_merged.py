"""TRL's asynchronous trainer, whose adapter is merged into the weights that vLLM samples from."""

from pathlib import Path

import trl_async
from progress import SETTINGS  # measured
from trl_merged_weights import MergedWeights

if __name__ == "__main__":
    trl_async.main(MergedWeights(SETTINGS["server"], Path(SETTINGS["output"]) / "merged"))
