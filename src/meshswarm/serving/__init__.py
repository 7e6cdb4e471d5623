"""The layers this peer serves: which, and when that changes."""

from meshswarm.serving.serving import Serving
from meshswarm.serving.settings import DEFAULT_N_CTX, Report, ServingSettings, Surroundings

__all__ = ["DEFAULT_N_CTX", "Report", "Serving", "ServingSettings", "Surroundings"]
