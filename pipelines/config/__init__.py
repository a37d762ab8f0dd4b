"""The run config: one pydantic model per section, and the rules that join them."""
