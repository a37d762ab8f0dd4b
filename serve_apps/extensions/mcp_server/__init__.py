"""The workflow of each team as a tool of an MCP server."""
