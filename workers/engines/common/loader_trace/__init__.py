"""Where an engine's own weight loader puts each checkpoint tensor: what vLLM's and SGLang's destinations share."""
