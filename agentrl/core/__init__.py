"""Vocabulary: records, ids, ports, clock, randomness, errors; and `files`, the only one that does I/O."""
