"""An episode without an engine, before anything is trained."""
