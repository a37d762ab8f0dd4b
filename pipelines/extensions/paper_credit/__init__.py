"""Credit rules of papers: debates, rounds of agents, searches, code and games."""
