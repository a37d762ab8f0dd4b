"""Documents that agents search: an index, a server of it, a client, and the tool."""
