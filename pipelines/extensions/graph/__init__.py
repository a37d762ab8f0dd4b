"""A workflow as a Mermaid flowchart."""
