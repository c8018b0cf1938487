"""RULER (Hsieh et al. 2024, arXiv 2404.06654): long texts with something in them to find, follow or count.

`sample` fits a text to a length in tokens, `needles`, `words` and `questions` make the texts, and `command` lets a
model answer and counts.
"""
