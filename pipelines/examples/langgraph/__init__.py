"""A program of LangGraph: a graph in which a model and a tool node take turns until the model answers."""
