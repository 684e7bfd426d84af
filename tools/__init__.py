"""Kept in the repository and not shipped: what checks the package at length, and what writes pages of ``docs/``."""
