"""The loop and its parts: buffer, staleness, scheduler, versions."""
