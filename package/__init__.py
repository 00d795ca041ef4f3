"""rlrefit: shard-to-shard weight refit between RL trainers and inference engines.

It installs as the package ``rlrefit`` with ``integration``, ``workers`` and ``recipes`` in it.
"""

__version__ = "0.1.0"
