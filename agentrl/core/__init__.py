"""Shared vocabulary: records, ids, ports, clock, randomness, errors; only `files` does I/O."""
