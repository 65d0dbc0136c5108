"""Task formats of other projects, as environments.

`harbor.py` reads task directories, without the format's own package. `runner.py` lets the packages of verifiers and
Inspect play their tasks, in a process of their own (`runner_program.py`). The others are sessions (`session.py`): of a
library, in `bfcl.py` and `gem.py`, or of a server, in `servers.py`. The rewards of each format equal those of its own
code (docs/how-to/task_formats.md).
"""
