"""The endpoint picker: a data plane such as Envoy asks it over gRPC where a request is to go, and carries the request itself.

Members, index, router, metrics and health are the gateway's. What is here is the Gateway API Inference Extension's protocol.
"""
