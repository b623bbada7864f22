"""Servers: the parts of kvyard that answer over HTTP, and the doctor that asks why nothing matches.

Each server has a package of its own. What they share is here: routes and refusals (``http``), the OpenAPI document that is
made from the same types that check requests (``openapi``), and a process that ends gracefully (``running``).

Importing this needs nothing beyond kvyard itself; starting a server needs ``kvyard[server]``.
"""
