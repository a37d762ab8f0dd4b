"""Worlds that remember what agents do to them: games, web shops, repositories, in processes of their own or behind a URL."""
