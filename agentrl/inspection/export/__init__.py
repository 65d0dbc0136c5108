"""Exports of episodes to other formats: HTML, JSON lines, Parquet."""
