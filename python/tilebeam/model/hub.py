"""Models by name: GGUF files of Hugging Face's hub, through huggingface_hub, whose cache, settings and tokens count.

A name is ``owner/repo``, ``owner/repo:QUANT`` or ``owner/repo/file.gguf``, where the file may be a pattern such as
``*q8_0.gguf``; `tilebeam.load` wants ``hf://`` before it. Without a quantization llama.cpp's rule holds: Q4_K_M, else
Q8_0, else the first model of the repository. Where the hub cannot be reached, or HF_HUB_OFFLINE=1, the cache answers.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Collection, Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from tilebeam.errors import TilebeamError
from tilebeam.extras import how_to_install

_NAME = re.compile(r"(?:hf:/{1,2})?(?P<repo>\w[\w.-]*/[\w.-]+?)(?::(?P<quant>[\w.-]+)|/(?P<file>.+))?")
_DEFAULTS = ("Q4_K_M", "Q8_0")
_TYPES = r"(?:UD-)?I?Q\d[A-Z0-9_]*|B?F16|FP16|F32|(?:MX|NV)FP4\w*|TQ\d_0"
_QUANT = re.compile(rf"(?<![A-Z0-9])({_TYPES})(?=[-./])", re.IGNORECASE)
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_PATIENCE = 10.0  # seconds until the hub counts as out of reach


def is_name(model: str | os.PathLike[str]) -> bool:
    """Tell whether this is a name that begins with hf://, also one that went through a `Path`."""
    return os.fspath(model).startswith("hf:/")


def missing(path: str | os.PathLike[str]) -> str:
    """Write the sentence about a model's file that does not exist; it may be a name of the hub."""
    text = os.fspath(path)
    like_a_name = _NAME.fullmatch(text) and not text.endswith(".gguf") and not os.path.isdir(text.split("/")[0])
    return f"{text} does not exist." + (
        f" On Hugging Face's hub? Then -hf {text}, or hf://{text}." if like_a_name else ""
    )


def local_file(name: str, file: str | None = None) -> str:
    """Return the path of a model of the hub, of a split one that of its first part; download what the cache lacks.

    Args:
        name: owner/repo, owner/repo:QUANT or owner/repo/file.gguf, with or without hf:// before it.
        file: a file of the repository, or a pattern that fits one model only.

    Raises:
        TilebeamError: there is no such model, it cannot be had, or huggingface_hub is missing.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise TilebeamError(
            f"{name!r} is no model of Hugging Face's hub: write OWNER/REPO, OWNER/REPO:Q4_K_M or OWNER/REPO/FILE.gguf."
        )
    repo, wanted = match["repo"], (match["quant"], file or match["file"])
    library = _library()
    try:
        info = library.HfApi().model_info(repo, timeout=_PATIENCE)
    except Exception as error:
        refused = isinstance(error, library.errors.HfHubHTTPError) and error.response.status_code < 500
        found = {} if refused else _newest(repo)
        if not found:
            raise _refusal(repo, error) from None
        return found[_chosen(repo, _models(found), *wanted)]
    models = _models(s.rfilename for s in info.siblings or [])
    chosen = models[_chosen(repo, models, *wanted)]
    try:
        paths: list[str] = [library.hf_hub_download(repo, part) for part in chosen]
        return paths[0]
    except Exception as error:
        raise _refusal(repo, error) from None


def _library() -> Any:
    try:
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ImportError:
        raise TilebeamError(f"Models by name need the package huggingface_hub: {how_to_install('hub')}") from None
    return huggingface_hub


def _models(files: Iterable[str]) -> dict[str, list[str]]:
    """Find the complete models among files: of each the file, or first part, and all its parts."""
    names, found = sorted(f for f in files if f.endswith(".gguf")), dict[str, list[str]]()
    for name in names:
        part = _PART.search(name)
        parts = [f for f in names if part and f[: part.start()] == name[: part.start()] and f.endswith(part[0][6:])]
        whole = part is None or (int(part[1]) == 1 and len(parts) == int(part[2]))
        if whole and "mmproj" not in name.lower() and "imatrix" not in name.lower():
            found[name] = parts or [name]
    return found


def _chosen(repo: str, models: Collection[str], quant: str | None, file: str | None) -> str:
    """Choose a model of a repository, or of what the cache has of it.

    Raises:
        TilebeamError: nothing fits; lists what there is.
    """
    if not models:
        raise TilebeamError(
            f"{repo} has no GGUF model. Look for a repository whose name ends in GGUF, or convert its safetensors with "
            "llama.cpp's convert_hf_to_gguf.py."
        )
    if file is not None:
        fitting = [name for name in models if name == file] or [name for name in models if fnmatch(name, file)]
        if len(fitting) == 1:
            return fitting[0]
        what = f"several models {file!r}" if fitting else f"no model {file!r}"
        raise TilebeamError(f"{repo} has {what}; it has: {', '.join(fitting or models)}.")
    for wanted in [quant] if quant else _DEFAULTS:
        pattern = re.compile(rf"(?<![A-Z0-9]){re.escape(wanted)}[-./]", re.IGNORECASE)
        if fitting := [name for name in models if pattern.search(name)]:
            return fitting[0]
    if quant:
        raise TilebeamError(f"{repo} has no {quant}; it has: {', '.join(map(_label, models))}.")
    return next(iter(models))


def _label(file: str) -> str:
    """Quantization that a file's name tells, else the name."""
    match = _QUANT.search(file)
    return match[1].upper() if match else file


def _newest(repo: str) -> dict[str, str]:
    """Files of a repository that the cache has, and their paths, the newest of each."""
    folder = Path(_library().constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}" / "snapshots"
    found: dict[str, str] = {}
    for snapshot in sorted(folder.glob("*"), key=lambda path: path.stat().st_mtime):
        found |= {str(p.relative_to(snapshot)): str(p) for p in snapshot.rglob("*.gguf") if p.exists()}
    return found


def _refusal(repo: str, error: Exception) -> TilebeamError:
    """Say in a sentence why a repository or file cannot be had."""
    constants, errors = _library().constants, _library().errors
    url, token = f"{constants.ENDPOINT}/{repo}", "give your token: `hf auth login`, or HF_TOKEN"
    why = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, errors.GatedRepoError):
        said = f"{repo} is gated: accept its terms at {url}, then {token}."
    elif isinstance(error, errors.RepositoryNotFoundError):
        said = f"{url} does not exist, or is private: check the name, or {token}."
    elif isinstance(error, errors.HfHubHTTPError):
        said = f"{constants.ENDPOINT} refused {repo}: {why}"
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        said = f"No room for {repo} in {constants.HF_HUB_CACHE}: free some, or set HF_HOME elsewhere."
    elif constants.HF_HUB_OFFLINE:
        said = f"{repo} is not in the cache ({constants.HF_HUB_CACHE}), and HF_HUB_OFFLINE is set."
    else:
        said = f"{repo} is not in the cache, and {constants.ENDPOINT} cannot be asked: {why}"
    return TilebeamError(said)
