"""Task formats of other projects, as environments of agentrl.

`harbor.py` reads task directories, without the format's own package. `runners.py` lets the packages of verifiers and
Inspect play their tasks, in a process of their own (`players.py`). The others are sessions: of a library, in `bfcl.py`
and `gem.py`, or of a server, in `servers.py`. The rewards of each format equal those of its own code.
"""
