"""Values of `cluster.address` at which no Ray can be."""

from __future__ import annotations

import socket

import pytest

from agentrl.cluster.session import RaySession, check_cluster_reachable
from agentrl.core.errors import InputError


@pytest.mark.parametrize("address", ["local", ":", "\n", "127.0.0.1:-1", "h:1e5"])
def test_an_address_that_is_none_is_refused_before_ray_gets_it(address: str) -> None:
    with pytest.raises(InputError, match="HOST:PORT"):
        check_cluster_reachable(address)


def test_nobody_at_an_address_is_told_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]  # free once this is closed
    with pytest.raises(InputError, match=rf"127\.0\.0\.1:{port}.*ray start"):
        check_cluster_reachable(f"127.0.0.1:{port}")


def test_a_cluster_that_refuses_the_connection_is_told_with_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def refuse(**options: object) -> None:
        raise ConnectionError("unauthenticated")

    monkeypatch.setattr(ray, "init", refuse)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        session = RaySession(f"127.0.0.1:{listening.getsockname()[1]}")
        with pytest.raises(InputError, match="RAY_AUTH_TOKEN"):
            session.start()


@pytest.mark.parametrize("address", ["redis://:hunter2@10.0.0.1:x", "user:hunter2@127.0.0.1:1", "ray://hunter2@h:1"])
def test_a_secret_in_an_address_is_not_repeated(address: str) -> None:
    with pytest.raises(InputError, match=r"\*\*\*@") as refused:
        check_cluster_reachable(address)
    assert "hunter2" not in str(refused.value)
