"""program: how a program that speaks OpenAI's API becomes an episode."""
