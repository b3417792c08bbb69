"""hotrack serves Mixture-of-Experts models on the hardware you have.

Importing the package stays cheap: the control plane never loads torch, so the public
names that need it are resolved on first use.
"""

from typing import TYPE_CHECKING, Any

from hotrack._version import __version__

if TYPE_CHECKING:
    from hotrack.core.sampling import SamplingParams
    from hotrack.engine.llm import LLM

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from hotrack.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from hotrack.core.sampling import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'hotrack' has no attribute {name!r}")
