"""Figures of episodes over time: training warnings, drift and alarms on served teams."""
