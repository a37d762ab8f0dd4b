"""The app that answers shadow requests with the candidate."""
