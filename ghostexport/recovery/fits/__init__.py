"""The closed forms: each makes an operator from what one pass gathered at its boundary."""
