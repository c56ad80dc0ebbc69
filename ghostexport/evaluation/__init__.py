"""What a variant costs in quality: text, the stream at the cut, generated text and zero-shot tasks, with intervals."""

from ghostexport.evaluation.quality import Forward, Quality, QualityMeter, WindowSums, evaluate, measure, torch_forward

__all__ = ["Forward", "Quality", "QualityMeter", "WindowSums", "evaluate", "measure", "torch_forward"]
