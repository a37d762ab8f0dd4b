"""Models without their chats: bare completions, and tokens of texts."""
