"""The six stages of an iteration, the measurements around them, and the one way to run any of them."""
