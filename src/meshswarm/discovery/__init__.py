"""How a peer finds the first others: those of last time, those it was told of, the local network, a rendezvous."""
