"""TRL's AsyncGRPOTrainer, with weights shard to shard from its ranks into a vLLM server."""
