"""Shared vocabulary: records, ids, ports, clock, randomness, errors.

Only `files`, `functions`, `machine` and `network` do I/O.
"""
