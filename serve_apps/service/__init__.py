"""service: what answers people's requests with promoted teams. See `serve_apps/gateway.py`."""
