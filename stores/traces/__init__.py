"""Episodes, their rewards and what is told of them, in LanceDB."""
