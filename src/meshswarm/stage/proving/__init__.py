"""Comparing parts of a model with the whole, on one artifact."""
