"""The OpenAI protocol: requests, replies, tool calls and error bodies, shared by the gateway and programs."""
