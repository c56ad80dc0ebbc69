"""What is put at a cut so that the pruned model behaves like the dense one: ``recover.py`` first, ``registry.py`` next.

``fits/`` has the closed forms, one family a file; ``refit/`` re-solves kept weights; ``trained/`` uses gradients.
"""
