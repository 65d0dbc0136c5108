"""Sandboxes for untrusted commands, with limits, built with bubblewrap or a container program.

`sandbox.py` has what environments use, `driver.py` the port and its records, `bubblewrap.py` and `container.py` the
drivers, `commands.py` what they share, `state.py` the files as a journal keeps them, `seccomp.py` the refused system
calls, and `checks.py` what this machine can prove. `keeper.py` is the process that owns bubblewrap's sandboxes, with
`lease.py` (one sandbox), `bwrap.py` (one command) and `file_tree.py` (the files below a directory). The sandbox of an
episode is `rollout/sandbox.py`.
"""
