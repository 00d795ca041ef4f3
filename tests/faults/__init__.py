"""Faults injected by seed into real refit sessions, and a judge of what the other ranks make of them.

``python -m tests.faults --trials 300 --seed 1`` runs them; :mod:`.trials` says which there are, :mod:`.judge` what has to hold.
"""
