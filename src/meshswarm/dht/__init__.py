"""The distributed hash table: who serves which layers of which model, found without a tracker.

`node.Dht` is the part's front door. Everything that decides (table, storage, lookup, answers, publications) is plain
code that is handed `now` and randomness; only `node` and `requests` touch the network.
"""
