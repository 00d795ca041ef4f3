"""NeMo-RL: weights shard to shard from its policy workers into the parameters of its vLLM workers."""
