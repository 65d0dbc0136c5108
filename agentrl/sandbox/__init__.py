"""Sandboxes for untrusted commands, with limits, built with bubblewrap.

`sandbox.py` has what environments use, `driver.py` the port and its records, `bubblewrap.py` the driver, `keeper.py`
the process that owns the sandboxes, `seccomp.py` the refused system calls, and `checks.py` what this machine can prove.
"""
