"""The doctor: why doesn't this prompt match? It listens to engines for a while and says which link of the chain is broken.

``watching`` brings the messages, ``case`` keeps what they showed of one engine, ``diagnosis`` says what that means.
"""
