"""The `troupe` command: one module per family of commands, and the options they share."""
