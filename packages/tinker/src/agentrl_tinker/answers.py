"""How a Tinker server describes what a client has."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from agentrl_tinker.errors import RequestRefusedError
from agentrl_tinker.messages import NO_PROJECTS
from agentrl_tinker.tables import EXTERNAL_WEIGHTS, SAMPLER_WEIGHTS, WEIGHTS, ClientModel, ClientTables

_CHECKPOINT_TYPES = {WEIGHTS: "training", SAMPLER_WEIGHTS: "sampler", EXTERNAL_WEIGHTS: "external"}
"""Names of the kinds of saved weights in the protocol."""
OWNER = "owner"
"""Name of the only owner of models, which the protocol asks for."""
_DIGITS = re.compile(r"[0-9]{1,18}")


def model_info(model: ClientModel) -> dict[str, Any]:
    """Describe a model for its training client."""
    data = {"arch": "agentrl", "model_name": model.base.name, "tokenizer_id": model.base.tokenizer}
    return {
        "type": "get_info",
        "model_id": model.id,
        "model_data": data,
        **_shape(model),
        "model_name": model.base.name,
    }


def _shape(model: ClientModel) -> dict[str, Any]:
    return {"is_lora": model.lora is not None, "lora_rank": None if model.lora is None else model.lora.rank}


def weights_info(tables: ClientTables, path: str) -> dict[str, Any]:
    """Describe saved weights by their path."""
    kind = next((kind for kind in _CHECKPOINT_TYPES if f"/{kind}/" in path), WEIGHTS)
    model = tables.saved_model(tables.saved_of(path, kind).path)
    return {"base_model": model.base.name, **_shape(model)}


def describe_model(tables: ClientTables, model: ClientModel, last_request_at: float) -> dict[str, Any]:
    """Describe a model as the protocol's training run."""
    checkpoints = checkpoint_list(tables, model)
    newest = {one["checkpoint_type"]: one for one in checkpoints}
    return {
        "training_run_id": model.id,
        "base_model": model.base.name,
        "model_owner": OWNER,
        **_shape(model),
        "corrupted": bool(model.failure),
        "last_request_time": _time(last_request_at),
        "last_checkpoint": newest.get("training"),
        "last_sampler_checkpoint": newest.get("sampler"),
        "user_metadata": model.metadata,
    }


def describe_session(tables: ClientTables, session_id: str) -> dict[str, Any]:
    """Name the models and samplers of a session.

    Raises:
        RequestRefusedError: there is no such session.
    """
    if session_id not in tables.sessions:
        raise RequestRefusedError(f"there is no session {session_id[:100]!r}", 404)
    return {
        "training_run_ids": [name for name in tables.models if name.startswith(f"{session_id}:")],
        "sampler_ids": [name for name in tables.samplers if name.startswith(f"{session_id}:")],
    }


def checkpoint_list(tables: ClientTables, model: ClientModel) -> list[dict[str, Any]]:
    """Describe the saved weights of a model."""
    tables.remove_expired(model)
    return [
        {
            "checkpoint_id": saved.checkpoint_id,
            "checkpoint_type": _CHECKPOINT_TYPES[saved.checkpoint_id.partition("/")[0]],
            "time": _time(saved.at),
            "tinker_path": saved.path,
            "user_metadata": saved.metadata,
            "expires_at": None if saved.expires is None else _time(saved.expires),
        }
        for saved in model.saved.values()
    ]


def page(name: str, items: Sequence[Any], request: Mapping[str, str]) -> dict[str, Any]:
    """Return the part of a list that a request asks for by `offset` and `limit`; without them, all of it.

    Raises:
        RequestRefusedError: one of them is no number of items, or the request names a project.
    """
    if request.get("project_id"):
        raise RequestRefusedError(f"project_id: {NO_PROJECTS}")
    offset, limit = _number(request, "offset", 0), _number(request, "limit", len(items))
    cursor = {"offset": offset, "limit": limit, "total_count": len(items)}
    return {name: items[offset : offset + limit], "cursor": cursor}


def _number(request: Mapping[str, str], name: str, default: int) -> int:
    text = request.get(name, str(default))
    if not _DIGITS.fullmatch(text):
        raise RequestRefusedError(f"{name}={text[:100]!r} is not a number of items")
    return int(text)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
