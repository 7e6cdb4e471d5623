"""Who lives, who leaves, who is busy and what is covered, told from neighbour to neighbour.

`core.Gossip` decides, without clock, sockets or tasks; `node.GossipNode` is the thin shell over a peer's endpoint.
"""
