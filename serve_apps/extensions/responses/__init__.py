"""OpenAI's Responses API, as a form of the chat API."""
