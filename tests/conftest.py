"""Fixtures for all tests: real servers and the real model, each started once, on first need."""

from __future__ import annotations

pytest_plugins = ["tests.servers", "tests.model_fixture"]
