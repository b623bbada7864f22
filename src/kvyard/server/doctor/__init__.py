"""The doctor: why doesn't this prompt match? It listens to engines, asks them, and says which link of the chain is broken.

``watching`` brings the messages, ``case`` keeps what they showed of one stream, ``visit`` asks an engine over HTTP,
``diagnosis`` says what that means.
"""
