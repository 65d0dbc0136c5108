"""What a disk that refuses means for the learning side: one `StorageError`, with the path and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from agentrl.core.errors import StorageError
from agentrl.core.files import remedy


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Around the writing of `path`.

    Raises:
        StorageError: the system or safetensors, which has errors of its own, could not write.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or " ".join(str(error).split())
        mend = remedy(error) if isinstance(error, OSError) else "free space or make it writable"
        raise StorageError(
            f"{path}: could not be written ({reason}); {mend}, then start the run again with --resume"
        ) from error
