"""Training that knows of NVFP4: linear layers compute with what the engine will read in place of their weights and inputs."""
