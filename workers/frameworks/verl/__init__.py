"""verl's training engines and vLLM rollouts as the two sides of a refit, shard to shard."""
