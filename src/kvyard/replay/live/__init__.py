"""A trace against a live endpoint: prompts that share what the trace says, sent when they are due, and the same report."""
