"""The models on this peer's disk: whole files in place, fetched pieces, headers."""
