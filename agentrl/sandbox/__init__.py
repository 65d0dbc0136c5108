"""Sandboxes for untrusted commands, with limits, built with bubblewrap.

`sandbox.py` has what environments use, `driver.py` the port and its records, `bubblewrap.py` the driver, `state.py` the
files as a journal keeps them, `keeper.py` the process that owns the sandboxes, `seccomp.py` the refused system calls,
and `checks.py` what this machine can prove. The sandbox of an episode is `rollout/sandbox.py`.
"""
