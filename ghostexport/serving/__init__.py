"""Talking to an engine: tokenizer and chat template, sampling, an OpenAI-compatible server. Imports no torch."""
