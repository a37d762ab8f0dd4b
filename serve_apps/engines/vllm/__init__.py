"""vLLM behind the port of engines. Nothing else imports vLLM."""
