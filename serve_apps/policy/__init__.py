"""The engine side: the vLLM policy app, its weights, its replicas, and the client that calls it."""
