"""Routing replay: the trainer's forward pass routes each token through the experts that the engine's pass used.

Engine and trainer compute in different dtypes, batches and kernels. If two experts score almost equally, the two passes
may choose differently, and a ratio then compares the probabilities of two different networks (R3, arXiv:2510.11370).
Only the choice is replaced: with s the router's logits in this pass and I the recorded set of experts, the router
computes its gate values from its scores at I (for most routers, a softmax over I). The router's weights therefore keep
their gradient, and each architecture its formula.

Owns: the routers of one model and their forced choices. Does not own: recording (`engines.embedded.capture`), the
alignment of records with tokens (`journal.rows`, `packing`). Invariant: a token without a record (-1) is routed
normally, and outside `forced` the model is unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from agentrl.core.errors import ModelError
from agentrl.engines.embedded.capture import chosen_experts, find_routers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOP_K = (torch.topk, Tensor.topk)


class RoutingReplay:
    """The routers of a model, in the order in which they run."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Find the routers, and test that each one's choice can be forced.

        Raises:
            ModelError: the model has no experts, or chooses them in an unsupported way.
        """
        names = find_routers(model)
        if not names:
            raise ModelError(
                f"engine.capture_routing: {type(model).__name__} has no router that reports its experts, so there is "
                "no routing to replay. Use a mixture-of-experts model such as Qwen3-MoE or Mixtral, or set "
                "capture_routing = false"
            )
        self._experts: Tensor | None = None  # [tokens, routers, top_k], of the pass in progress
        self.top_k = 0
        for layer, name in enumerate(names):
            router = model.get_submodule(name)
            forward = router.forward
            self.top_k = _check(forward, name, model)
            # Patches the instance, because other models use the class too. PEFT's wrappers call the module, and so this
            # method.
            router.forward = self._replaying(forward, layer)
        self.layers = len(names)

    def _replaying(self, forward: Callable[..., Any], layer: int) -> Callable[..., Any]:
        def replaying(*inputs: Any, **named: Any) -> Any:
            if self._experts is None:
                return forward(*inputs, **named)
            with _ForcedTopK(self._experts[:, layer]):
                return forward(*inputs, **named)

        return replaying

    @contextmanager
    def forced(self, experts: Tensor) -> Iterator[None]:
        """Force the recorded experts in a forward pass within the context.

        Args:
            experts: int [tokens, routers, top_k] in the order the model sees the tokens; -1: its own choice.

        Raises:
            ModelError: the record belongs to a model with other experts.
        """
        if tuple(experts.shape[1:]) != (self.layers, self.top_k):
            raise ModelError(
                f"the recorded routing has {experts.shape[1]} layers of {experts.shape[2]} experts per token, the "
                f"model {self.layers} of {self.top_k}: the journal is of another model, or the engine counts layers "
                "differently"
            )
        self._experts = experts
        try:
            yield
        finally:
            self._experts = None

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the two contexts for `torch.utils.checkpoint`: a null context for the forward pass, and one that
        forces the same experts for recomputation."""
        return nullcontext(), nullcontext() if self._experts is None else self.forced(self._experts)


class _ForcedTopK(TorchFunctionMode):
    """A mode in which a top-k over the last dimension takes given indices instead of the largest."""

    def __init__(self, experts: Tensor | None) -> None:
        super().__init__()
        self._experts = experts
        self.calls = 0

    def __torch_function__(
        self, function: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        named: Mapping[str, Any] = kwargs or {}
        found = function(*args, **named)
        if function not in _TOP_K:
            return found
        self.calls += 1
        if self._experts is None:
            return found
        scores: Tensor = args[0] if args else named["input"]
        chosen = torch.where(self._experts >= 0, self._experts, found[1])
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))


def _check(forward: Callable[..., Any], name: str, model: PreTrainedModel) -> int:
    """Test that a router's choice can be forced; return the number of experts it chooses per token.

    Raises:
        ModelError: the router does not choose by one top-k whose indices it returns.
    """
    router = model.get_submodule(name)
    width = next(iter(router.parameters())).shape[-1]
    device = model.device
    inputs = torch.linspace(-1.0, 1.0, 4 * width, device=device, dtype=next(router.parameters()).dtype).view(4, width)
    try:
        with torch.no_grad(), _ForcedTopK(None) as watched:
            own = chosen_experts(forward(inputs))
        count = own.shape[1]
        wanted = own.max().new_tensor(range(count)).expand_as(own).contiguous()
        with torch.no_grad(), _ForcedTopK(wanted):
            found = chosen_experts(forward(inputs))
        known = watched.calls == 1 and torch.equal(found, wanted)
    except (TypeError, RuntimeError, AttributeError, StopIteration) as error:
        raise _unknown(name, model, str(error)) from error
    if not known:
        raise _unknown(name, model, f"{watched.calls} top-k selections")
    return count


def _unknown(name: str, model: PreTrainedModel, seen: str) -> ModelError:
    return ModelError(
        f"engine.capture_routing: the router {name} of {type(model).__name__} does not select its experts by one top-k "
        f"({seen}), so a recorded selection cannot be replayed in training. Set capture_routing = false; importance "
        f"ratios then include the difference in routing"
    )
