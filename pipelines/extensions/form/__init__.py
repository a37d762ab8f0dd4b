"""How a gain splits into form and substance."""
