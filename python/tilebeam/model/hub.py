"""Models by name: GGUF files of Hugging Face's hub, through huggingface_hub, whose cache, settings and tokens count.

A name is ``owner/repo``, ``owner/repo:QUANT`` or ``owner/repo/file.gguf``, where the file may be a pattern such as
``*q8_0.gguf``; `tilebeam.load` wants ``hf://`` before it. Without a quantization llama.cpp's rule holds: Q4_K_M, else
Q8_0, else the first model of the repository. Where the hub cannot be reached, or HF_HUB_OFFLINE=1, the cache answers.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from tilebeam.errors import TilebeamError
from tilebeam.extras import how_to_install

_NAME = re.compile(r"(?:hf:/{1,2})?(?P<repo>\w[\w.-]*/[\w.-]+?)(?::(?P<quant>[\w.-]+)|/(?P<file>.+))?")
_PATIENCE = 10.0  # seconds until the hub counts as out of reach
_DEFAULTS = ("Q4_K_M", "Q8_0")
_QUANT = re.compile(r"(?<![A-Z0-9])((?:UD-)?I?Q\d[A-Z0-9_]*|B?F16|FP16|F32|MXFP4\w*|TQ\d_0)(?=[-./])", re.IGNORECASE)
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_NO_MODELS = ("mmproj", "imatrix")
_TOKEN = "give your token: `hf auth login`, or HF_TOKEN"


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
    repo, quant, file = match["repo"], match["quant"], file or match["file"]
    _need_library()
    from huggingface_hub import HfApi, errors, hf_hub_download

    try:
        files = [file.rfilename for file in HfApi().model_info(repo, timeout=_PATIENCE).siblings or []]
    except Exception as error:
        refused = isinstance(error, errors.HfHubHTTPError) and error.response.status_code < 500
        found = {} if refused or isinstance(error, ValueError) else _newest(repo)
        if not found:
            raise _refusal(repo, error) from None
        return found[_chosen(repo, _complete(found), quant, file)]
    paths = []
    for part in _parts(_chosen(repo, files, quant, file), files):
        try:
            paths.append(hf_hub_download(repo, part))
        except Exception as error:
            raise _refusal(repo, error) from None
    return paths[0]


def _need_library() -> None:
    try:
        import huggingface_hub  # noqa: F401
    except ImportError:
        raise TilebeamError(f"Models by name need the package huggingface_hub: {how_to_install('hub')}") from None


def _chosen(repo: str, files: Iterable[str], quant: str | None, file: str | None) -> str:
    """Choose a model of a repository, or of what the cache has of it.

    Raises:
        TilebeamError: nothing fits; lists what there is.
    """
    models = _models(files)
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
    return models[0]


def _models(files: Iterable[str]) -> list[str]:
    """Those of the files that are models, of split ones the first parts."""
    names = [f for f in sorted(files) if f.endswith(".gguf") and not any(word in f.lower() for word in _NO_MODELS)]
    return [name for name in names if (part := _PART.search(name)) is None or int(part[1]) == 1]


def _label(file: str) -> str:
    """Quantization that a file's name tells, else the name."""
    match = _QUANT.search(file)
    return match[1].upper() if match else file


def _parts(file: str, files: Iterable[str]) -> list[str]:
    """All parts of a split model, or the one file."""
    part = _PART.search(file)
    if part is None:
        return [file]
    return sorted(f for f in files if f.startswith(file[: part.start()] + "-") and f.endswith(f"-of-{part[2]}.gguf"))


def _complete(files: Iterable[str]) -> list[str]:
    """Those of the files that are no parts of a model of which others are missing."""
    files = list(files)
    return [f for f in files if (part := _PART.search(f)) is None or len(_parts(f, files)) == int(part[2])]


def _refusal(repo: str, error: Exception) -> TilebeamError:
    """Say in a sentence why a repository or file cannot be had."""
    from huggingface_hub import constants, errors

    url = f"{constants.ENDPOINT}/{repo}"
    if isinstance(error, errors.GatedRepoError):
        return TilebeamError(f"{repo} is gated: accept its terms at {url}, then {_TOKEN}.")
    if isinstance(error, errors.RepositoryNotFoundError):
        return TilebeamError(f"{url} does not exist, or is private: check the name, or {_TOKEN}.")
    if isinstance(error, errors.HfHubHTTPError):
        return TilebeamError(f"{constants.ENDPOINT} refused {repo}: {' '.join(str(error).split())}")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return TilebeamError(f"No room for {repo} in {constants.HF_HUB_CACHE}: free some, or set HF_HOME elsewhere.")
    if constants.HF_HUB_OFFLINE:
        return TilebeamError(f"{repo} is not in the cache ({constants.HF_HUB_CACHE}), and HF_HUB_OFFLINE is set.")
    why = " ".join(str(error).split()) or type(error).__name__
    return TilebeamError(f"{repo} is not in the cache, and {constants.ENDPOINT} cannot be asked: {why}")


# --- the cache --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CachedModel:
    """A GGUF model in huggingface_hub's cache.

    Attributes:
        name: as -hf takes it.
        size: bytes of all its parts.
        path: of its file, or its first part.
        last_used: seconds since 1970.
    """

    name: str
    size: int
    path: str
    last_used: float


def cached_models() -> list[CachedModel]:
    """List the complete GGUF models in the cache, those used last first.

    Raises:
        TilebeamError: huggingface_hub is missing.
    """
    _need_library()
    found = []
    for repo in _repos():
        paths = _newest(repo)
        complete = _complete(paths)
        for file in _models(complete):
            label = _label(file)
            short = label != file and _chosen(repo, complete, label, None) == file
            parts = [os.stat(paths[part]) for part in _parts(file, complete)]
            name = f"{repo}:{label}" if short else f"{repo}/{file}"
            found.append(CachedModel(name, sum(p.st_size for p in parts), paths[file], max(p.st_atime for p in parts)))
    return sorted(found, key=lambda model: -model.last_used)


def _repos() -> list[str]:
    """Repositories of models in the cache."""
    from huggingface_hub import constants

    folders = Path(constants.HF_HUB_CACHE).glob("models--*--*")
    return sorted("/".join(folder.name.split("--")[1:]) for folder in folders)


def _newest(repo: str) -> dict[str, str]:
    """Files of a repository that the cache has, and their paths, the newest of each."""
    from huggingface_hub import constants

    snapshots = (Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}" / "snapshots").glob("*")
    found = {}
    for snapshot in sorted(snapshots, key=lambda folder: folder.stat().st_mtime):
        found |= {str(p.relative_to(snapshot)): str(p) for p in snapshot.rglob("*.gguf") if p.exists()}
    return found
