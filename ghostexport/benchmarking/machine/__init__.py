"""Probes of the machine that measures: what it is, its energy, its memory."""
