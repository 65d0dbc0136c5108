"""Sandboxes for untrusted commands, with limits, built with bubblewrap or a container program.

`sandbox.py` has what environments use, `driver.py` the port and its records, `bubblewrap.py` and `container.py` the
drivers, `commands.py` what they share, `state.py` the files as a journal keeps them, `keeper.py` the process that owns
bubblewrap's sandboxes, `seccomp.py` the refused system calls, and `checks.py` what this machine can prove. The sandbox
of an episode is `rollout/sandbox.py`.
"""
