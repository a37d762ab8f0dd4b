"""Small repositories with one fault: a locator, a coder and a verifier repair them."""
