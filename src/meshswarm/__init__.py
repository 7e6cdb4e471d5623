"""A peer-to-peer swarm that runs language models no single member could hold."""

__version__ = "0.1.0"
