"""Who did what for whom: `receipt` is what both sides of a session sign, `store` keeps it.

A receipt passes through three hands. The provider makes a `Claim` and sends its envelope; the consumer answers with
`Receipt.countersign` and sends the acknowledgement's envelope; the provider joins the two with `Receipt.join`.
"""
