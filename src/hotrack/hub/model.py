"""What a MODEL named by a user turned out to be."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """Local files of one model.

    ``path`` is a folder with ``config.json`` (kind 'folder') or a ``.gguf`` file (kind 'gguf'). ``name`` is
    the served name unless the user chooses another.
    """

    kind: Literal["folder", "gguf"]
    path: Path
    name: str
