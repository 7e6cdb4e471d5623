"""Lets these tests import the programs in scripts/ as the modules they are; they are for POSIX systems."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
collect_ignore_glob = ["*"] if sys.platform == "win32" else []
