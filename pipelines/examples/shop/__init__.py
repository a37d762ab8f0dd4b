"""A web shop game with WebShop's actions and reward: a searcher and a buyer on one shop."""
