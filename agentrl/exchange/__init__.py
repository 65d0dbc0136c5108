"""Exports a run's episodes as files of other tools, and imports such files as a run."""
