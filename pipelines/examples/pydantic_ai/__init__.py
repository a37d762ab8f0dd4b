"""A program of Pydantic AI: an agent with a tool, whose answer is an object of a type."""
