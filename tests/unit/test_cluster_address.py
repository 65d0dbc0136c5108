"""Values of `cluster.address` at which no Ray can be."""

from __future__ import annotations

import pytest

from agentrl.cluster.session import check_answers
from agentrl.core.errors import InputError


@pytest.mark.parametrize("address", ["local", ":", "\n", "127.0.0.1:-1", "h:1e5"])
def test_an_address_that_is_none_is_refused_before_ray_gets_it(address: str) -> None:
    with pytest.raises(InputError, match="give 'auto', or HOST:PORT"):
        check_answers(address)
