"""Conversations as token sequences: chat templates and formats."""
