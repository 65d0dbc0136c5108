"""Pure vocabulary: records, ids, ports, clock, randomness and errors. Nothing here does I/O."""
