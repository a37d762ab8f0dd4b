"""What Troupe keeps: records, traces, weights, the journal of stages and the team registry."""
