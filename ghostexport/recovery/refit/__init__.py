"""``+refit``: kept blocks re-solved on the repaired stream, and the sequences that judge whether that helps."""
