"""The mock engine: a vLLM endpoint to every client and router, without a GPU. See ``docs/how-to/mock-engine.md``.

The same ``EngineCore`` as in a replay decides what runs, hits, is evicted and announced, and when tokens come; here they come
over HTTP, and events over ZeroMQ. What the tokens say is made up, the same for the same prompt.
"""
