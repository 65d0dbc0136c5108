"""The part `flex` of `benchmarks.devices`: the attention kernels that torch and Triton compile for cards absent here.

Each kernel is compiled in full, down to the card's machine code, for the call that `learn.forward` makes, with the
options that it chooses for the card. Torch is told that there is a card; nothing runs on it. Needs g++.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from agentrl.learn.forward import flex_options

CARDS = {(8, 0): 166_912, (8, 6): 101_376, (8, 9): 101_376, (9, 0): 232_448, (12, 0): 101_376}
"""Bytes of shared memory per block that a card allows, by compute capability."""
WIDTHS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float32)
QUICK = (((8, 9), 128, torch.bfloat16, 40),)
HEADS, KEY_HEADS, BLOCK = 16, 8, 128
TOKENS = (1000, 40)
"""Queries of a call: those of a step, and fewer than 128, for which torch would choose its decoding kernel."""
_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
static c10::impl::DeviceGuardImplRegistrar absent(
    c10::DeviceType::CUDA, new c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>());
"""
"""Lets a torch without CUDA select a CUDA device, as tracing does."""


def figures(quick: bool) -> dict[str, float | None]:
    """Compile, in a process of its own, because torch cannot be told that a card is gone again."""
    cases = QUICK if quick else tuple(product(CARDS, WIDTHS, DTYPES, TOKENS))
    fitting = 0
    for capability in dict.fromkeys(case[0] for case in cases):
        asked = json.dumps([(width, str(dtype), tokens) for of, width, dtype, tokens in cases if of == capability])
        command = [sys.executable, "-m", "benchmarks.devices_flex", json.dumps(capability), asked]
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        for width, dtype, tokens, used in json.loads(ran.stdout.splitlines()[-1]):
            fitting += 0 < used <= CARDS[capability]
            kernel = f"{capability}, heads of {width}, {dtype}, {tokens} queries"
            print(f"{kernel}: {f'{used:,} bytes of {CARDS[capability]:,}' if used else 'no kernel'}", flush=True)
    return {"flex_fits": fitting / len(cases)}


class _CompiledError(Exception):
    """Ends a compilation when the kernel exists."""


def _pretend_card(capability: tuple[int, int], shared_memory: int) -> None:
    """Make torch and Triton generate code for a card."""
    with tempfile.TemporaryDirectory() as directory:
        source, library = Path(directory, "guard.cpp"), Path(directory, "guard.so")
        source.write_text(_GUARD)
        root = Path(torch.__path__[0])
        command = ["g++", "-std=c++20", "-shared", "-fPIC", f"-I{root / 'include'}", str(source)]
        subprocess.run([*command, f"-L{root / 'lib'}", "-lc10", "-o", str(library)], check=True)
        ctypes.CDLL(str(library))
    import triton.runtime
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.fx_passes import joint_graph, post_grad
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget

    number = 10 * capability[0] + capability[1]
    card = SimpleNamespace(
        name="absent",
        major=capability[0],
        minor=capability[1],
        multi_processor_count=100,
        regs_per_multiprocessor=65_536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
        total_memory=24 << 30,
        L2_cache_size=40 << 20,
        gcnArchName="",
        shared_memory_per_block_optin=shared_memory,
    )

    def returning(value: object) -> Any:
        return lambda *_, **__: value

    def tell(owner: Any, values: dict[str, object]) -> None:
        for name, value in values.items():
            setattr(owner, name, returning(value))

    properties = {"get_device_properties": card, "current_device": 0}
    tell(torch.cuda, {**properties, "is_available": True, "is_initialized": True, "device_count": 1})
    tell(torch.cuda, {"get_device_capability": capability, "_exchange_device": 0, "_maybe_exchange_device": 0})
    tell(torch.cuda, {"_lazy_init": None, "get_rng_state": torch.zeros(16, dtype=torch.uint8), "set_rng_state": None})
    tell(torch._C, {"_cuda_getDevice": 0, "_cuda_getCurrentRawStream": 0})
    tell(CudaInterface, {"is_available": True, "is_triton_capable": True, "raise_if_triton_unavailable": None})
    tell(CudaInterface, {"get_compute_capability": number, "get_device_properties": card})
    tell(CudaInterface.Worker, properties)
    tell(triton_helpers, {"set_driver_to_gpu": None})
    tell(joint_graph, {"lazy_init": None})  # patterns of other operations, traced on the device
    tell(post_grad, {"lazy_init": None})
    driver = SimpleNamespace()
    tell(driver, {"get_current_target": GPUTarget("cuda", number, 32), "get_active_torch_device": "cuda:0"})
    tell(driver, {"get_current_device": 0, "get_current_stream": 0, "get_device_interface": torch.cuda})
    triton.runtime.driver.set_active(driver)


def _compile(width: int, dtype: torch.dtype, tokens: int, shared_memory: int) -> int:
    """Return the bytes of shared memory that the kernel of the forward pass wants; 0: torch has no such kernel."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.exc import InductorError
    from torch._subclasses.fake_tensor import FakeTensorMode

    wanted: list[int] = []

    def compile_kernel(_: object, name: str, source: str, **_device: str) -> None:
        kernel = getattr(PyCodeCache.load(source), name)
        wanted.append(kernel._precompile_config(kernel.configs[0]).kernel.shared)
        raise _CompiledError

    AsyncCompile.triton = compile_kernel
    torch.compiler.reset()
    with FakeTensorMode():
        with torch.device("cuda"):
            query, key, value = (
                torch.empty(1, tokens, heads, width, dtype=dtype).transpose(1, 2)
                for heads in (HEADS, KEY_HEADS, KEY_HEADS)
            )
            until, position, before = (torch.empty(tokens, dtype=torch.int64) for _ in range(3))
            blocks = -(-tokens // BLOCK)
            shapes = [(1, 1, blocks), (1, 1, blocks, blocks)] * 4
            lists = [torch.empty(shape, dtype=torch.int32) for shape in shapes]

        def visible(row: Any, head: Any, query_at: Any, key_at: Any) -> Any:
            return (key_at <= query_at) & (query_at < until[key_at]) & (position[key_at] > before[query_at])

        mask = BlockMask((tokens, tokens), *lists, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=visible)
        options: Any = flex_options(width, dtype, shared_memory)
        attend = torch.compile(flex_attention, dynamic=True, fullgraph=True)
        try:
            attend(query, key, value, block_mask=mask, enable_gqa=True, kernel_options=options)
        except InductorError as error:
            if "NoValidChoicesError" in str(error):
                return 0
            if not wanted:
                raise
    return wanted[0]


def main() -> None:
    """Compile for one card and print what each kernel wants."""
    capability, cases = (json.loads(argument) for argument in sys.argv[1:])
    shared_memory = CARDS[tuple(capability)]
    with tempfile.TemporaryDirectory() as caches:
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": caches, "TRITON_CACHE_DIR": caches}
        _pretend_card(tuple(capability), shared_memory)
        dtypes = {str(dtype): dtype for dtype in DTYPES}
        found = [
            (*case, _compile(width, dtypes[name], n, shared_memory)) for case in cases for width, name, n in [case]
        ]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
