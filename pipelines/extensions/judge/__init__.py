"""A served model that grades answers, as a reward."""
