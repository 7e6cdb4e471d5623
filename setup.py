"""Builds the optional native tap; all else about the package stands in pyproject.toml.

Without a C compiler the installation succeeds all the same: the tap then runs in Python, slower.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "meshswarm.stage.engine._tap",
            sources=["src/meshswarm/stage/engine/tap.c"],
            py_limited_api=True,
            optional=True,
        )
    ]
)
