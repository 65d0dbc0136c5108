"""The refusal of a request."""

from __future__ import annotations

from agentrl.parts import InputError


class RequestRefusedError(InputError):
    """A request that is not executed.

    Args:
        message: what the client should change.
        status: status of the HTTP answer.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status
