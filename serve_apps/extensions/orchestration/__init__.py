"""An agent that chooses which agents and tools of a team act next."""
