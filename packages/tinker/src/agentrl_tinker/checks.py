"""What a Tinker server refuses before it accepts a request, with a sentence that says what to change."""

from __future__ import annotations

import json
import re
from typing import Any

from agentrl.parts import InputError
from agentrl_tinker import messages
from agentrl_tinker.samples import check_sample
from agentrl_tinker.tables import WEIGHTS, BaseModel, ClientTables, finished_line

MAX_TTL_S = 1 << 32
"""Maximum seconds for which weights are saved with `ttl_seconds`."""
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MAX_METADATA_BYTES = 1 << 16
"""Maximum size of one `user_metadata`, as JSON."""


def check_request(tables: ClientTables, request: Any, *, max_context: int) -> None:  # noqa: C901, PLR0912
    """Refuse what cannot be executed, before it is accepted.

    Raises:
        InputError: the message says what to change.
    """
    check_labels(request)
    match request:
        case messages.CreateModel():
            _check_model(tables, request)
        case messages.LoadWeights():
            saved = tables.saved_of(request.path, WEIGHTS)
            base = tables.saved_model(saved.path).base
            if request.base_model is not None and request.base_model != base.name:
                raise InputError(f"{request.path} belongs to {base.name}, not to {request.base_model[:100]}")
            _check_adam(request.optimizer_config)
            if request.model_id is not None:
                model, source = tables.models[request.model_id], tables.saved_model(saved.path)
                if (model.base, model.lora) != (source.base, source.lora):
                    raise InputError(f"{request.path} holds weights of another base model, rank or layers")
        case messages.ForwardBackwardRequest():
            from agentrl_tinker.losses import check_rows

            base = tables.models[request.model_id].base
            limits = {"vocabulary": base.learner.vocabulary, "max_context": max_context}
            check_rows(request.rows, request.loss_fn, request.settings, **limits)
        case messages.OptimStep():
            _check_step(request.adam_params)
        case messages.SaveWeights():
            _check_name(request.path)
            tables.check_unused(tables.models[request.model_id], request)
        case messages.SaveExternal():
            _check_name(request.path)
        case messages.SaveForSampler():
            if (request.path is None) == (request.sampling_session_seq_id is None):
                raise InputError("give either a path or a sampling_session_seq_id")
            if request.path is not None:
                _check_name(request.path)
            elif (session := request.model_id.rpartition(":train:")[0]) in tables.finished:
                raise InputError(finished_line(session))
            tables.check_unused(tables.models[request.model_id], request)
            if request.kind not in ("snapshot", "inflight"):
                raise InputError(f"kind {request.kind[:40]!r} is not served; there are snapshot and inflight")
        case messages.Sample():
            sampler = tables.samplers[request.sampling_session_id]
            check_sample(request, max_context=max_context, vocabulary=sampler.base.learner.vocabulary)


def _check_model(tables: ClientTables, request: messages.CreateModel) -> None:
    base = tables.base_of(request.base_model)
    _check_adam(request.optimizer_config)
    if base.trains_all_weights:
        _check_full_model(base, request.lora_config)
        return
    if request.lora_config is None or request.lora_config.rank == 0:
        raise InputError(
            f"only adapters of {base.name} are trained here, not all weights: give lora_config with a rank from 1, or "
            f'set models.{base.name}.weights = "full" for the server'
        )
    if not 1 <= request.lora_config.rank <= base.max_rank:
        raise InputError(
            f"lora_config.rank = {request.lora_config.rank}: adapters of {base.name} may have a rank from 1 to "
            f"{base.max_rank} here (models.{base.name}.max_rank)"
        )
    if request.lora_config.seed is not None and not 0 <= request.lora_config.seed < 1 << 63:
        raise InputError("lora_config.seed: a seed is a number from 0 to 2^63 - 1")
    base.learner.layers(attention=request.lora_config.train_attn, mlp=request.lora_config.train_mlp)


def _check_full_model(base: BaseModel, shape: messages.Lora | None) -> None:
    """Refuse a part of a base model whose weights are all trained."""
    if shape is not None and shape.rank:
        raise InputError(
            f"lora_config.rank = {shape.rank}: all weights of {base.name} are trained here "
            f'(models.{base.name}.weights = "full"), and no adapters: give rank 0, or no lora_config'
        )
    if shape is not None and not (shape.train_attn and shape.train_mlp and shape.train_unembed):
        raise InputError(
            f"lora_config: all weights of {base.name} are trained here, so train_attn, train_mlp and train_unembed "
            "must be true"
        )


def check_labels(request: Any) -> None:
    """Refuse a time to live or data about a model that are out of range.

    Raises:
        InputError: the message names it.
    """
    seconds, metadata = getattr(request, "ttl_seconds", None), getattr(request, "user_metadata", None)
    if seconds is not None and not 1 <= seconds <= MAX_TTL_S:
        raise InputError(f"ttl_seconds: from 1 to {MAX_TTL_S} are possible")
    if metadata is not None and len(json.dumps(metadata)) > MAX_METADATA_BYTES:
        raise InputError(f"user_metadata: more than {MAX_METADATA_BYTES} bytes")


def _check_adam(optimizer: messages.Optimizer | None) -> None:
    if optimizer is not None and optimizer.type != "adamw":
        raise InputError(f"the optimizer {optimizer.type[:40]!r} is not served here; there is adamw")


def _check_name(name: str) -> None:
    if not _SAFE_NAME.fullmatch(name):
        raise InputError(f"{name[:80]!r} becomes part of a path: up to 64 letters, digits, '.', '_' and '-'")


def _check_step(adam: messages.Adam) -> None:
    """Refuse settings with which AdamW cannot step.

    Raises:
        InputError: the message names the setting.
    """
    ranges = {
        "learning_rate": adam.learning_rate >= 0,
        "beta1": 0 <= adam.beta1 < 1,
        "beta2": 0 <= adam.beta2 < 1,
        "eps": adam.eps > 0,  # with 0, a gradient of 0 makes its weight NaN, as in a new adapter
        "weight_decay": adam.weight_decay >= 0,
    }
    for name, is_valid in ranges.items():
        if not is_valid:
            raise InputError(f"adam_params.{name} = {getattr(adam, name)} is out of range")
