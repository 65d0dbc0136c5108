"""vLLM behind the Engine port, in a child process; importing this needs no vLLM."""
