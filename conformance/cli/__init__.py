"""Implements the command line: ``main`` declares the options of each command, the module of its name runs it."""

EXIT = {"conforms": 0, "partly_observed": 0, "differs": 1, "usage": 2, "incomplete": 3}
