"""A program of the OpenAI Agents SDK: one agent hands a sum over to another, which calls a calculator tool."""
