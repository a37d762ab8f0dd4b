"""gpu_check: does this machine's GPU do what the documentation says? `make gpu-check`; see `__main__.py`."""
