"""What each framework is asked. These modules run in the frameworks' own environments, without Troupe."""
