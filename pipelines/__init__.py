"""The six stages of the loop, the run config, the local runner and the command line."""
