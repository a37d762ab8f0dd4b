"""Production traffic: deploying a team, canary and shadow, promotion and rollback by hand."""
