"""What runs when a workflow runs: policy apps, agents, workflows, tools and their deployment."""
