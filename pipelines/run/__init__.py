"""A run: its stores, its journal keys, its champions, its engines."""
