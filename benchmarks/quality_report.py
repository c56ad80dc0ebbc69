def render(work, results): pass
