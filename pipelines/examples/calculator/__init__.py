"""A program written against the `openai` client that calls a calculator tool."""
