"""A Python that has imported a package already: programs run in forks of one process.

Importing Inspect or verifiers takes seconds of CPU time, and a row of the conformance table starts two programs.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import select
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from importlib import import_module
from pathlib import Path

CLIENT = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect({path!r})
    request = json.dumps([[each for each in sys.argv[1:] if each != "-P"], os.getcwd(), dict(os.environ)])
    socket.send_fds(connection, [request.encode()], [0, 1, 2])
    status = connection.recv(1)
    os._exit(status[0] if status else 1)
"""


@functools.cache
def preloaded(python: Path, *modules: str) -> str:
    """Return a program that runs others as a Python does, in which the modules are imported."""
    directory = tempfile.TemporaryDirectory(prefix="python-")
    path, program = f"{directory.name}/socket", Path(directory.name) / "python"
    program.write_text(CLIENT.format(python=sys.executable, path=path))
    program.chmod(0o755)
    server = subprocess.Popen([python, "-P", __file__, path, *modules], stdin=subprocess.PIPE)
    while not os.path.exists(path):
        assert server.poll() is None, f"{python} cannot import {modules}"
        time.sleep(0.05)
    _held.append((directory, server))
    return str(program)


_held: list[tuple[tempfile.TemporaryDirectory[str], subprocess.Popen[bytes]]] = []
"""Directories and servers; a server ends with its standard input, which the end of this process closes."""


def serve(path: str, *modules: str) -> None:
    """Fork for each request, until standard input ends."""
    for module in modules:
        import_module(module)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{path}.new")
        listening.listen(64)
        os.rename(f"{path}.new", path)
        while 0 not in select.select([0, listening], [], [])[0]:
            connection, _ = listening.accept()
            if os.fork() == 0:
                if os.fork() == 0:
                    answer(connection)
                os._exit(0)
            os.wait()
            connection.close()


def answer(connection: socket.socket) -> None:
    """Run a program with the files of the client, and send its exit status."""
    request, files, *_ = socket.recv_fds(connection, 1 << 20, 3)
    arguments, directory, variables = json.loads(request)
    process = os.fork()
    if process:
        for file in files:
            os.close(file)
        connection.sendall(bytes([os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) & 255]))
        os._exit(0)
    connection.close()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = arguments
    status = 0
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else end.code is not None
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - as Python ends a program
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(status))


if __name__ == "__main__":
    serve(*sys.argv[1:])
