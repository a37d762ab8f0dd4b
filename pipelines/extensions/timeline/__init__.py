"""Who was at work when in an iteration, and for whom the others waited."""
