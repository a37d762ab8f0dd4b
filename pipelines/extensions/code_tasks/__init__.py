"""Tasks whose answer is a program: their tests, a judge, and a workflow."""
