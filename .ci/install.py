"""Install into the environment of this interpreter: `python .ci/install.py` with the arguments of pip's `install`.

uv installs in about a quarter of pip's time, but reads none of pip's configuration. It gets the indexes, links,
constraints, and certificates from there. pip installs instead if uv is not available, if a setting of pip has no
counterpart in uv, or if uv fails.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

PIP = (sys.executable, "-m", "pip")
CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"

VARIABLES = {
    "cert": "SSL_CERT_FILE",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "index-url": "UV_DEFAULT_INDEX",
    "no-cache-dir": "UV_NO_CACHE",
    "no-index": "UV_NO_INDEX",
    "proxy": "ALL_PROXY",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "trusted-host": "UV_INSECURE_HOST",
}
"""The variable that uv reads, for each setting of pip."""

IRRELEVANT = {
    *("cache-dir", "config-file", "disable-pip-version-check", "exists-action", "log", "no-color", "no-input"),
    *("no-python-version-warning", "no-warn-script-location", "progress-bar", "quiet", "require-virtualenv"),
    *("retries", "root-user-action", "src", "verbose"),
}
"""Settings of pip that do not change what is installed."""

_QUERY = re.compile(r"(?<=\w)\?[^\s`'\"]+")
"""The query of a URL, which may have a token; uv hides passwords itself."""
SOURCES = {"UV_DEFAULT_INDEX", "UV_FIND_LINKS", "UV_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_NO_INDEX"}


def pip_settings(configuration: str) -> dict[str, str]:
    """Return the settings in the output of `pip config list` that decide what is installed."""
    sections: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}  # a later one overrides
    for line in configuration.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if section in sections and key not in IRRELEVANT:
            sections[section][key] = ast.literal_eval(value)
    return sections["global"] | sections["install"] | sections[":env:"]


def uv_options(settings: Mapping[str, str]) -> list[str]:
    """Return options of uv for settings of pip. A variable would not do: uv ignores it beside the option."""
    return [option for path in settings.get("constraint", "").split() for option in ("--constraint", path)]


def uv_environment(settings: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which uv installs what pip would.

    Args:
        settings: settings of pip.
        environment: the variables of this process. Variables of uv that are set there are kept.

    Raises:
        LookupError: uv has no counterpart of a setting; its name.
    """
    if unknown := settings.keys() - VARIABLES.keys() - {"constraint"}:
        raise LookupError(min(unknown))
    # As pip, take the best version of all indexes, not all versions of the first index that knows the name.
    values = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    for key, variable in VARIABLES.items():
        if key in settings:
            values[variable] = ("," if key == "find-links" else " ").join(settings[key].split())
    if "UV_HTTP_TIMEOUT" in values:
        values["UV_HTTP_TIMEOUT"] = values["UV_HTTP_TIMEOUT"].partition(".")[0]
    values |= environment
    if values.keys() & SOURCES:  # these decide on the build of torch; uv would ask the index of torch instead
        values.pop("UV_TORCH_BACKEND", None)
    return values


def install_with_uv(arguments: list[str]) -> str | None:
    """Returns None if all is installed, else why not."""
    listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=False)
    settings = pip_settings(listed.stdout)
    try:
        environment = uv_environment(settings, os.environ)
    except LookupError as error:
        return f"uv has no counterpart of pip's setting {error}"
    quiet = ("--quiet", "--disable-pip-version-check", "--no-input")
    if subprocess.run([*PIP, "install", *quiet, "-c", CONSTRAINTS, "uv"], check=False).returncode:
        return "uv cannot be installed"
    command = [sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable]
    command += [*arguments, *uv_options(settings)]
    if sys.stderr.isatty():
        code = subprocess.run(command, env=environment, check=False).returncode
    else:
        with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            for line in process.stderr:
                if not line.startswith((" + ", " - ", " ~ ")):  # each package
                    print(_QUERY.sub("?…", line.rstrip()), flush=True)
        code = process.returncode
    return f"uv failed with exit code {code}" if code else None


def main() -> int:
    arguments = sys.argv[1:]
    reason = install_with_uv(arguments)
    if reason is None:
        return 0
    print(f"{reason}; installing with pip, which takes some minutes", flush=True)
    quiet = () if sys.stdout.isatty() else ("--quiet",)
    command = [*PIP, "install", *quiet, "--disable-pip-version-check", "--no-input", *arguments]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
