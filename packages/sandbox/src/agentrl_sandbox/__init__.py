"""Drivers of agentrl's sandboxes: bubblewrap and container programs.

`bubblewrap.py` and `container.py` are the drivers, `commands.py` is what they share, `seccomp.py` the refused system
calls, and `checks.py` what this machine can prove. `keeper.py` is the process that owns bubblewrap's sandboxes, with
`lease.py` (one sandbox), `bwrap.py` (one command) and `file_tree.py` (the files below a directory). The keeper imports
this module, so it imports nothing.
"""
