"""llmprof: measure a short PyTorch training run, forecast the big one.

The public names are loaded on first use, so that forecasting never imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmprof.errors import LlmprofError
    from llmprof.extrapolate.predict import predict
    from llmprof.hooks.session import Session, profile, session
    from llmprof.schema.cluster import Cluster
    from llmprof.schema.layout import Layout
    from llmprof.schema.profile import Profile
    from llmprof.schema.store import load_profile
    from llmprof.schema.workload import Workload

__version__ = "0.1.0"

_HOME = {
    "Cluster": "llmprof.schema.cluster",
    "Layout": "llmprof.schema.layout",
    "LlmprofError": "llmprof.errors",
    "Profile": "llmprof.schema.profile",
    "Session": "llmprof.hooks.session",
    "Workload": "llmprof.schema.workload",
    "load_profile": "llmprof.schema.store",
    "predict": "llmprof.extrapolate.predict",
    "profile": "llmprof.hooks.session",
    "session": "llmprof.hooks.session",
}

__all__ = [
    "Cluster",
    "Layout",
    "LlmprofError",
    "Profile",
    "Session",
    "Workload",
    "load_profile",
    "predict",
    "profile",
    "session",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'llmprof' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
