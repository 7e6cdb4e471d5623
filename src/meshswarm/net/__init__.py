"""Peers reach each other: dial a key, get a connection, open streams.

`endpoint.Endpoint` is the part's front door. Everything that decides (frames, handshake, liveness, path MTU,
admission) is plain code that is handed `now` and randomness; sockets and timers live in the shells beside it, and
`quic` is the one place that touches aioquic's private parts.
"""
