"""What all requests of a gateway share: teams, callers, slots, figures, capture."""
