"""The gateway's HTTP: routes, limits, streams and the server."""
