"""vLLM behind the Engine port, in a process of its own; nothing here is imported where vLLM is not installed."""
