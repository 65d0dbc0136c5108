"""Shared vocabulary: records, ids, ports, clock, randomness, errors.

Only `files`, `custom_functions`, `machine` and `network` do I/O.
"""
