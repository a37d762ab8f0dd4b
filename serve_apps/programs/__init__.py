"""programs: examples of programs that know nothing of Troupe; `serve_apps/workflows/program.py` trains them as they are."""
