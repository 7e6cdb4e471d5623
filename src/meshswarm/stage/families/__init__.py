"""Which models may be split between layers, where, and how: a table with one row per architecture.

The rule this package keeps: an architecture stands in the table only when a parity test proved its cuts, since several
wrong cuts load fine and answer silently wrong. All others are served whole, and the refusal says why.
"""
