"""Sources of tasks: generators and files, and the fields of common data sets."""
