"""The gateway: production traffic, canaries, shadows, open episodes, and the admin interface."""
