"""Ray clusters: connections, jobs over the REST API, faults and stack dumps."""
