"""What the author of a workflow writes with: agents, workflows, contracts, graphs and worlds."""
