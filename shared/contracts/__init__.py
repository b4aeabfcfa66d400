"""The lowest floor: what services say to each other and what must hold. Pure data, pure functions.

Imports the standard library and msgspec only; no clock, no randomness, no input or output.
"""
