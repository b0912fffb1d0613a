"""Which attention kernel a card runs for a `scaled_dot_product_attention`, and its tensors.

`backend_rules` has the decision, a pure function of a call and the settings it meets (`call`); `backends` the call
itself, with the kernel so chosen.
"""
