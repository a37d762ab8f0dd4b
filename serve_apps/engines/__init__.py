"""Engines behind one port: vLLM, transformers, and those that a dotted path names."""
