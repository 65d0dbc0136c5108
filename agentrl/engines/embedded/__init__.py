"""The embedded engine: continuous batching of a Hugging Face causal LM in one process, on a CPU or one GPU."""
