"""Anthropic's Messages API, as a form of the chat API."""
