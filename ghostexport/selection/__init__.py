"""Criteria: which decoder blocks to remove. A score and how it picks make a row of ``registry.CRITERIA``."""
