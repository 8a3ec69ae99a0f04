"""Measurements of modkit beside torch and other libraries."""
