"""Hugging Face repositories through ``huggingface_hub``: resumable, its cache shared with other tools."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from tqdm import tqdm  # type: ignore[import-untyped]

from hotrack.config import env
from hotrack.core.errors import CheckpointError
from hotrack.core.progress import Progress

# Nothing that could run code: no pickles, no Python.
ALLOW_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "LICENSE*"]
IGNORE_PATTERNS = ["*/*"]  # other formats live in subfolders


def cached_snapshot(repo_id: str) -> Path | None:
    """The complete local snapshot of a repository, or None. No network."""
    try:
        return Path(
            snapshot_download(
                repo_id,
                allow_patterns=ALLOW_PATTERNS,
                ignore_patterns=IGNORE_PATTERNS,
                local_files_only=True,
            )
        )
    except (OSError, ValueError):
        return None


def download_snapshot(repo_id: str, progress: Progress | None) -> Path:
    """Bring a repository's model files up to date. Raises CheckpointError with a remedy."""
    with _explained(repo_id):
        return Path(
            snapshot_download(
                repo_id,
                allow_patterns=ALLOW_PATTERNS,
                ignore_patterns=IGNORE_PATTERNS,
                local_files_only=env.offline(),
                tqdm_class=_bar(progress),
            )
        )


def config_folder(repo_id: str) -> Path:
    """A folder with a repository's config.json, fetched if it is not there. No weights are, and the cache of
    snapshots stays without one that has no weights. Raises CheckpointError with a remedy."""
    cached = try_to_load_from_cache(repo_id, "config.json")
    if isinstance(cached, str):
        return Path(cached).parent
    folder = env.cache_dir() / "configs" / repo_id.replace("/", "--")
    if not (folder / "config.json").is_file():
        with _explained(repo_id):
            hf_hub_download(repo_id, "config.json", local_dir=folder, local_files_only=env.offline())
    return folder


@contextmanager
def _explained(repo_id: str) -> Iterator[None]:
    """Errors of a download, with what to do about them."""
    try:
        yield
    except GatedRepoError as e:
        raise CheckpointError(
            f"{repo_id} is gated: accept its terms at https://huggingface.co/{repo_id} "
            "and log in with 'hf auth login'"
        ) from e
    except RepositoryNotFoundError as e:
        raise CheckpointError(
            f"Hugging Face has no repository {repo_id!r} that you may read; check the spelling, or log in"
        ) from e
    except HFValidationError as e:
        raise CheckpointError(f"{repo_id!r} is not a valid Hugging Face repository name") from e
    except LocalEntryNotFoundError as e:  # an EntryNotFoundError, too
        why = "HF_HUB_OFFLINE is set" if env.offline() else "Hugging Face could not be reached"
        raise CheckpointError(
            f"{repo_id} is not complete in the local cache and {why}; "
            "check the network, or name a local folder"
        ) from e
    except EntryNotFoundError as e:
        raise CheckpointError(
            f"{repo_id} has no config.json; name a repository of a model in the format of transformers"
        ) from e
    except Exception as e:  # the HTTP library below has errors of its own
        raise CheckpointError(
            f"cannot download {repo_id}: {type(e).__name__}: {e}; try again to resume"
        ) from e


def _bar(progress: Progress | None) -> type[Any]:
    """A silent tqdm class that forwards byte counts: the only hook snapshot_download offers."""

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # Of its bars (files, bytes on the wire, bytes written) the last is what a user waits for.
            self.counts_written = "Reconstruct" in str(kwargs.get("desc"))
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "file": io.StringIO(), "disable": progress is None})

        def display(self, msg: str | None = None, pos: int | None = None) -> None:  # noqa: ARG002
            if progress is not None and self.counts_written and self.total:
                progress(int(self.n), int(self.total))

    return Bar
