"""Task formats of other projects, as environments.

`harbor.py` reads task directories, without the format's own package. `runner.py` lets the packages of verifiers and
Inspect play their tasks, in a process of their own (`runner_program.py`). The rewards of each format equal those of its
own code (docs/task_formats.md).
"""
