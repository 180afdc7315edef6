"""Facts about engines and about this machine, for `paritree engines` and `paritree doctor`."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from typing import Any

SHM_MIN = 256 << 20  # requests and answers of all shards live in shared memory; 64 MiB is Docker's default and too little


def engine_facts(engine: str) -> dict[str, Any]:
    """What the engine says of itself, asked in a worker. Raises EngineLoadError."""
    from campaigns.isolation import Supervisor
    from campaigns.trial import patience

    with Supervisor(engine, deadline_s=patience()) as supervisor:
        d = supervisor.description
    return {
        "engine": engine, "name": d.name, "version": d.version, "profile": d.profile.name, "capabilities": sorted(d.capabilities), "ops": sorted(d.ops),
        "taps": sorted(d.taps), "departures": [f"{departure.field} = {departure.value}: {departure.reason}" for departure in d.departures],
    }  # fmt: skip


def machine_facts() -> list[dict[str, Any]]:
    """name, found, ok, advice."""
    return [_python(), *_packages(), _compiler(), _cache(), _shared_memory(), _platform(), _profile()]


def _fact(name: str, found: str, ok: bool, advice: str = "") -> dict[str, Any]:
    return {"name": name, "found": found, "ok": ok, "advice": advice}


def _python() -> dict[str, Any]:
    return _fact("Python", platform.python_version(), sys.version_info >= (3, 11), "install Python 3.11 or newer")


def _packages() -> list[dict[str, Any]]:
    from importlib.metadata import PackageNotFoundError, version

    out = []
    for name in ("numpy", "hypothesis", "pandas", "pyarrow", "safetensors", "jinja2"):
        try:
            out.append(_fact(name, version(name), True))
        except PackageNotFoundError:
            out.append(_fact(name, "missing", False, f"python -m pip install {name}"))
    return out


def _compiler() -> dict[str, Any]:
    from impls.native import build

    try:
        command = build.find_compiler()
        return _fact("C++ compiler", f"{' '.join(command)}: {build.compiler_version(command).splitlines()[0]}", True)
    except build.BuildError as problem:
        return _fact("C++ compiler", "none", False, str(problem))


def _cache() -> dict[str, Any]:
    from impls.native import build

    folder = build.cache_folder()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    ok = os.access(existing, os.W_OK)
    return _fact("cache", str(folder), ok, f"make {existing} writable, or set PARITREE_CACHE to another folder")


def _shared_memory() -> dict[str, Any]:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        return _fact("shared memory", "no /dev/shm", True)
    return _fact("shared memory", f"{free >> 20} MiB free", free >= SHM_MIN, "in a container: --shm-size=1g")


def _platform() -> dict[str, Any]:
    return _fact(
        "platform",
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        sys.platform in ("linux", "darwin"),
        "Linux is tested",
    )


def _profile() -> dict[str, Any]:
    note = (
        "CI is set; campaigns pass every Hypothesis setting themselves"
        if os.environ.get("CI")
        else "campaigns pass every setting themselves"
    )
    return _fact("Hypothesis profile", note, True)
