"""Task formats of other projects, as environments.

`harbor.py` reads task directories, without the format's own package. The rewards of each format equal those of its own
code (docs/task_formats.md).
"""
