"""What serving can do beside the core, a folder each; the core imports none of them."""
