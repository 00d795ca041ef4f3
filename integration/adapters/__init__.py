"""Plug-ins for the trainers and engines of others. Each imports its host package in its own module alone."""
