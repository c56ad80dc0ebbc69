"""The command line, behind ``cli.py``: what it parses, what it calls, what it prints."""
