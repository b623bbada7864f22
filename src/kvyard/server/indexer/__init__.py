"""The indexer as a service: event streams in over ZeroMQ, answers out over HTTP, on one event loop.

Its routes are those of Dynamo's standalone indexer (Mooncake RFC 1403), with ``/score`` and ``/explain`` beside them. See
``docs/how-to/index-service.md``.
"""
