"""Errors planted in the trainer's forward passes, which the check at start must not choose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from agentrl.core.errors import ModelError
from agentrl.learn.forward_check import why_unshared

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LEAK, POSITIONS, FACTOR = "leaked neighbor", "positions + 1", "wrong rope factor"


class PlantedErrors:
    """Hooks that change the trainer's passes. The model's own, whose caller gives no positions or mask, stays right,
    even if the model gives its body some.

    `LEAK` adds a tenth of another row's hidden state to one of each row behind the first layer, `POSITIONS` moves what
    stands behind the eighth token by one, `FACTOR` stretches all positions by a tenth.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        body: nn.Module = model.get_decoder()
        embeddings = model.get_input_embeddings()
        if body is model:
            body = next(child for child in model.children() if any(part is embeddings for part in child.modules()))
        self._model, self._body = model, body
        self._own = False
        """Whether a pass of the model's own runs."""
        self._layers = next(module for module in body.modules() if isinstance(module, nn.ModuleList))
        self._rotary = [each for each in body.modules() if hasattr(each, "inv_freq") or hasattr(each, "rope_type")]
        self._learned = any("position" in name or name == "wpe" for name, _ in body.named_children())
        self._error = ""
        self._begins: Tensor | None = None
        """In the pass that runs: where another row begins among tokens in one line; None: the rows are padded."""
        self._inside = False

    def possible(self) -> tuple[str, ...]:
        """The errors there are for this model: some have no positions, some do not rotate by them."""
        positions = (POSITIONS,) if self._rotary or self._learned else ()
        return (LEAK, *positions, *((FACTOR,) if self._rotary else ()))

    @contextmanager
    def planted(self, error: str) -> Iterator[None]:
        """With one of them in the model."""
        self._error = error
        hooks = [
            self._model.register_forward_pre_hook(self._begin, with_kwargs=True),
            self._model.register_forward_hook(self._end, always_call=True),
            self._body.register_forward_pre_hook(self._enter, with_kwargs=True),
            self._body.register_forward_hook(self._leave),
            self._layers[0].register_forward_hook(self._leak),
            *(each.register_forward_pre_hook(self._stretch, with_kwargs=True) for each in self._rotary),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _begin(self, _: nn.Module, __: Any, kwargs: dict[str, Any]) -> None:
        self._own = kwargs.get("position_ids") is None and kwargs.get("attention_mask") is None

    def _end(self, *_: object) -> None:
        self._own = False

    def _enter(self, _: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
        self._inside = not self._own and (positions is not None or mask is not None)
        if not self._inside:
            return None
        self._begins = None if positions is None else positions[0, 1:] != positions[0, :-1] + 1
        if self._error == POSITIONS:
            if positions is None:
                positions = torch.arange(mask.shape[1]).expand(mask.shape)
            kwargs = {**kwargs, "position_ids": positions + (positions >= 8)}
        return args, kwargs

    def _leave(self, *_: object) -> None:
        self._inside = False

    def _stretch(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._inside or self._error != FACTOR:
            return None
        if "position_ids" in kwargs:
            return args, {**kwargs, "position_ids": kwargs["position_ids"] * 1.1}
        return (args[0], args[1] * 1.1, *args[2:]), kwargs

    def _leak(self, _: nn.Module, __: object, output: Any) -> Any:
        if not self._inside or self._error != LEAK:
            return None
        hidden: Tensor = output[0] if isinstance(output, tuple) else output
        if self._begins is None:
            leaked = hidden + 0.1 * hidden.roll(1, dims=0)
        else:
            leaked = hidden.clone()
            leaked[0, 1:][self._begins] += 0.1 * hidden[0, :-1][self._begins]
        return (leaked, *output[1:]) if isinstance(output, tuple) else leaked


def missed(model: PreTrainedModel, max_context: int) -> list[str]:
    """The errors that the check at start lets pass."""
    errors, passed = PlantedErrors(model), []
    for error in errors.possible():
        with errors.planted(error):
            try:
                why_unshared(model, max_context)
            except ModelError as refusal:
                if "differ from the model's own" in str(refusal):
                    continue
            passed.append(error)
    return passed
