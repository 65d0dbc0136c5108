"""Checks of models at the start that compare a model with itself in short rows instead of at many lengths.

Trainer and embedded engine spend seconds on these checks, and the tests start hundreds of them. What the checks find at
all lengths is proved by the tests marked `full_start_check`.
"""

from __future__ import annotations

from agentrl.engines import models

_FULL = dict(models._CHECK_OPERATIONS)
_SHORT = dict.fromkeys(_FULL, 0.0)  # lengths of windows and chunks stay


def use_full_start_checks(is_full: bool) -> None:
    """Choose between the lengths that users get and the shortest."""
    models._CHECK_OPERATIONS.update(_FULL if is_full else _SHORT)


use_full_start_checks(False)
