"""Code that stands beside a checkpoint of Kimi-K2.5: own and small, with the names of what is published there."""
