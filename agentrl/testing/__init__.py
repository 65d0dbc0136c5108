"""Public test tools: simulated loop, in-memory journal, recording trainer, builders."""
