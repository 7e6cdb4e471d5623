"""A part of a model as a file."""
