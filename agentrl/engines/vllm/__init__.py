"""vLLM behind the Engine port, in a process of its own; importing this needs no vLLM."""
