"""Sandboxes for untrusted commands, with limits, built with bubblewrap.

`driver.py` has the port and its records, `bubblewrap.py` the driver, `keeper.py` the process that owns the sandboxes,
`seccomp.py` the system calls they are refused, and `checks.py` what this machine can prove.
"""
