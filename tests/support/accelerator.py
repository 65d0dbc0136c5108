"""A make-believe accelerator: a torch device in pure Python that computes on the CPU and behaves like a GPU.

Its tensors wrap CPU tensors. An operation on tensors of two devices raises, as on CUDA. `Counters` attributes every
copy between the devices, and every wait of the host for the device, to the line of agentrl that caused it.

`register_device` registers it with torch (as PrivateUse1), which must precede the first backward pass of a process.
Tests therefore run in a separate process (`tests/support/device_cases.py`). The device shows nothing about kernels,
streams, memory or rounding on a real card.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretend"
_HOST = torch.device("cpu")
_WAITS = {
    *("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select", "aten::repeat_interleave"),
    *("aten::_unique2", "aten::unique_dim", "aten::is_nonzero", "aten::bincount"),
}
"""Operations whose result, or the size of it, the host has to wait for."""
_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
"""Operations that take an index on either device."""


class MixedDevicesError(RuntimeError):
    """An operation got tensors of two devices."""


@dataclass(slots=True)
class Counters:
    """Counts of what a GPU's host waits for, by the line of agentrl: `learn/trainer.py:270`."""

    waits: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)
    """Copies from the host to the device."""
    matmuls: Counter[torch.dtype] = field(default_factory=Counter)
    """Matrix products, by dtype."""

    def clear(self) -> None:
        """Start counting from 0."""
        for counter in (self.waits, self.copies, self.matmuls):
            counter.clear()


COUNTERS = Counters()


class _Backend:
    """The functions that torch expects of a device's module."""

    @staticmethod
    def is_available() -> bool:
        return True

    is_initialized = is_available

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        return None

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16]

    @staticmethod
    def device(index: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


@cache
def register_device() -> torch.device:
    """Register the device with torch; returns it."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Backend())
    return torch.device(NAME, 0)


class DeviceTensor(Tensor):
    """A tensor on the device."""

    host: Tensor
    __slots__ = ("host",)
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: Tensor) -> DeviceTensor:
        made: DeviceTensor = Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            layout=host.layout,
            device=register_device(),
        )
        return made

    def __init__(self, host: Tensor) -> None:
        self.host = host

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.host})"

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: DeviceTensor) -> None:
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.host = value.host

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def tolist(self) -> Any:
        COUNTERS.waits[_line()] += 1
        return self.host.tolist()

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(operation, args, kwargs or {})


def _line() -> str:
    """The innermost line of agentrl on the stack."""
    frame = sys._getframe()
    while frame is not None:
        _, mark, path = frame.f_code.co_filename.rpartition("/agentrl/")
        if mark:
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"


def _on_device(value: object) -> bool:
    return isinstance(value, DeviceTensor)


def _to_host(value: Any) -> Any:
    return value.host if isinstance(value, DeviceTensor) else value


def _to_device(value: Any) -> Any:
    return DeviceTensor(value) if isinstance(value, Tensor) and not _on_device(value) else value


def _tensors(*values: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _count_copy(source: Tensor, target: torch.device) -> None:
    if _on_device(source) and target.type != NAME:
        COUNTERS.waits[_line()] += 1
    elif not _on_device(source) and target.type == NAME:
        COUNTERS.copies[_line()] += 1


def _check_devices(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse tensors of two devices, except for numbers on the host, which CUDA takes as well."""
    operands = _tensors(args, kwargs)
    if name in _INDEXING:
        for index in _tensors(args[1]):
            if index.dtype in (torch.bool, torch.uint8):
                COUNTERS.waits[_line()] += 1
            elif not _on_device(index):
                COUNTERS.copies[_line()] += 1
        operands = [args[0], *_tensors(args[2:])]
    if any(not _on_device(each) and each.dim() for each in operands):
        raise MixedDevicesError(
            f"{name} at {_line()}: expected all tensors on one device, found at least two, {NAME} and cpu"
        )


def _run(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on the host copies of its operands."""
    name = operation._schema.name
    target = kwargs.get("device")
    made_there = target is not None and torch.device(target).type == NAME
    if not made_there and not any(map(_on_device, _tensors(args, kwargs))):
        return operation(*args, **kwargs)
    if name in _WAITS:
        COUNTERS.waits[_line()] += 1
    if name in ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_grouped_mm"):
        COUNTERS.matmuls[args[0].dtype] += 1
    if name == "aten::_to_copy":
        destination = torch.device(target) if target is not None else args[0].device
        _count_copy(args[0], destination)
        others = {key: value for key, value in kwargs.items() if key not in ("device", "non_blocking", "pin_memory")}
        copied = operation(_to_host(args[0]), **others)
        return _to_device(copied) if destination.type == NAME else copied
    if name in ("aten::copy_", "aten::_copy_from"):
        _count_copy(args[1], args[0].device)
        _to_host(args[0]).copy_(_to_host(args[1]))
        return args[0]
    if name == "aten::_fused_sdp_choice":
        return 0  # plain matrix products
    if not made_there:
        _check_devices(name, args, kwargs)
    here, settings = pytree.tree_map(_to_host, (args, kwargs))
    if made_there:
        settings["device"] = _HOST
    settings.pop("pin_memory", None)
    if name == "aten::histc" and not here[0].is_floating_point():  # CUDA has it for integers
        return _to_device(operation(here[0].float(), *here[1:], **settings).to(here[0].dtype))
    result = operation(*here, **settings)
    if target is not None and not made_there:
        return result
    return return_and_correct_aliasing(operation, args, kwargs, pytree.tree_map(_to_device, result))


class _Mode(TorchDispatchMode):
    """Creates tensors on the device; only within it does the device exist."""

    def __enter__(self) -> _Mode:
        self._before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(…, device=) makes a host tensor and copies it
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        torch._C._set_only_lift_cpu_tensors(self._before)
        super().__exit__(*error)

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(operation, args, kwargs or {})


@contextlib.contextmanager
def accelerator() -> Iterator[torch.device]:
    """Make the device usable, in this thread and in the worker threads that are given work meanwhile."""
    device = register_device()
    submit, inference = ThreadPoolExecutor.submit, torch.inference_mode

    def submit_within(pool: ThreadPoolExecutor, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        def run() -> Any:
            with _Mode():
                return work(*args, **kwargs)

        return submit(pool, run)

    ThreadPoolExecutor.submit = submit_within  # type: ignore[assignment, method-assign]
    # Composite operations reach a Python device whole in inference mode, and without it in their parts.
    torch.inference_mode = lambda mode=True: torch.no_grad() if mode else contextlib.nullcontext()  # type: ignore
    try:
        with _Mode():
            yield device
    finally:
        ThreadPoolExecutor.submit, torch.inference_mode = submit, inference  # type: ignore[method-assign, misc]
