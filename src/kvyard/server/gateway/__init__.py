"""The gateway: an OpenAI-compatible reverse proxy that sends each request to the engine that can begin soonest.

It follows the engines' KV events, routes by the policies of ``kvyard.router``, streams answers through byte for byte, and tries
another engine if one fails before its first byte. See ``docs/how-to/gateway.md``.
"""
