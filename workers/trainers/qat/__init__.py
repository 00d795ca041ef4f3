"""Training that knows of NVFP4 or INT4: linear layers compute with what the engine will read in place of their weights, and in NVFP4 of their inputs."""
