"""What shaped a team or an answer, and what an episode shaped."""
