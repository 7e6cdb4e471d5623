"""Model files from other peers and from the web, and for other peers: found, fetched in parts, seeded."""
