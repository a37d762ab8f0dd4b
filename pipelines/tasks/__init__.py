"""Where tasks come from: generators, files, data sets, and how their fields are read."""
