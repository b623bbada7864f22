"""The engine: requests, scheduler, timing models, model shapes, and the core that runs them under any clock."""
