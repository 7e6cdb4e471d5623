"""What the commands of `cli` do, one module a command; `cli` itself only parses."""
