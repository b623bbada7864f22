"""The doctor: finds out why a prompt doesn't match. It follows and queries engines, and names the broken link of the chain.

``watching`` receives messages, ``case`` has the observations of one stream, ``visit`` queries an engine over HTTP, and
``diagnosis`` makes findings of them.
"""
