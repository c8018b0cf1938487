"""From raw text to the token files that Megatron trains on, and nothing else.

`corpus` reads text, `train_tokenizer` trains a SentencePiece model, `tokenizer` builds the tokenizer that training
uses, `preprocess` writes .bin/.idx pairs, `validate` checks such a pair before a run starts. Importing any of these
modules is cheap: torch and Megatron are imported inside the functions that need them.
"""
