"""What a variant costs in quality: text, the stream at the cut, generated text and zero-shot tasks, with intervals."""
