"""Measurements of a running instance, each a module; `harness` has what they share."""
