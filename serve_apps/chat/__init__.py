"""Messages of a chat <-> the tokens of a model, and texts of any length."""
