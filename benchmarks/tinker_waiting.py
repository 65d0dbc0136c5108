"""How long one key of a Tinker server waits beside an attack by another key.

* `tinker_wait_ratio`: the largest ratio, over six attacks, of a key's median wait beside the attack to its median wait
  beside one client that does what it does: 16 requests of 16 long samples, 300 requests for long samples, 200
  `create_model`, passes of 24 models, 320 bodies that never end under a limit of 400 open files, and many sessions and
  models with as much metadata as possible.
* `requests_lost`: number of the key's requests that failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import resource
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import torch

from benchmarks.parts import ROOT as _ROOT  # noqa: F401
from tests.e2e.test_tinker_shares import ROWS, base_sampler, send_slowly
from tests.support.tinker_client import OTHER_KEY, Client, Refused, server_config, serving
