"""What drives the stages: the local runner, the begin and claim of an iteration, validation and maintenance."""
