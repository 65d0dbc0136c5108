"""Readers of runs, which import no environment."""
