"""Tools of MCP servers as tools of workflows."""
