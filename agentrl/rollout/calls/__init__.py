"""Calls of an episode's program, each answered once: by the journal on re-execution, by the world the first time."""
