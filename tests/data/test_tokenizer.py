"""The tokenizer is Megatron's, its flags mean what Megatron's mean, and failing to build it takes one sentence."""

import argparse
import dataclasses
import importlib.util
import pickle

import pytest

from megagate.data.tokenizer import BYTE_LEVEL, TOKENIZER_TYPES, add_tokenizer_arguments, build_tokenizer
from megagate.errors import UserError


def test_types_are_megatrons():
    from megatron.core.tokenizers.utils.build_tokenizer import SUPPORTED_TOKENIZERS

    other_data = {"MultimodalTokenizer", "NullMultimodalTokenizer", "SFTTokenizer"}
    assert set(TOKENIZER_TYPES) == {*SUPPORTED_TOKENIZERS, BYTE_LEVEL} - other_data


def test_flags_have_megatrons_names_and_defaults():
    from megatron.training.argument_utils import ArgumentGroupFactory
    from megatron.training.config.training_config import TokenizerConfig

    theirs = argparse.ArgumentParser()
    ArgumentGroupFactory(TokenizerConfig).build_group(theirs, "tokenizer")
    ours = argparse.ArgumentParser()
    names = add_tokenizer_arguments(ours)
    their_actions = {action.dest: action for action in theirs._actions}
    fields = {field.name for field in dataclasses.fields(TokenizerConfig)}
    for action in ours._actions:
        if action.dest == "help":
            continue
        assert action.dest in names
        assert action.dest in fields
        assert action.option_strings[0] in their_actions[action.dest].option_strings
        assert action.default == their_actions[action.dest].default


def test_null_tokenizer():
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=100)
    assert tokenizer.tokenize("1 2 99") == [1, 2, 99]
    assert (tokenizer.vocab_size, tokenizer.eod) == (100, 99)


def test_byte_tokenizer():
    tokenizer = build_tokenizer(BYTE_LEVEL, special_tokens=["<a>", "<b>"])
    text = " \u00e9<a>\0\n "
    assert tokenizer.tokenize(text) == list(text.encode())
    assert tokenizer.detokenize([258, *text.encode(), 0xC3, 256]) == text  # half a character is none
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (260, 256, 257)
    assert tokenizer._tokenizer.tokens_to_ids(["<|endoftext|>", "<pad>", "<a>", "<b>"]) == [256, 257, 258, 259]
    assert pickle.loads(pickle.dumps(tokenizer)).unique_identifiers == tokenizer.unique_identifiers
    assert tokenizer.unique_identifiers != build_tokenizer(BYTE_LEVEL).unique_identifiers


def test_the_sentencepiece_wrapper_adds_nothing(tokenizer):
    assert tokenizer.tokenize("") == []
    assert tokenizer.bos_id not in tokenizer.tokenize("a")
    assert tokenizer.tokenize(" a") != tokenizer.tokenize("a")


def test_what_cannot_be_built_is_said(tmp_path, model_path):
    broken = tmp_path / "broken.model"
    broken.write_text("not a model")
    cases = [
        (("SentencePieceTokeniser",), {}, "is not one of .*; did you mean SentencePieceTokenizer"),
        (("SentencePieceTokenizer",), {}, "SentencePieceTokenizer needs --tokenizer-model"),
        (("SentencePieceTokenizer", str(tmp_path / "brokn.model")), {}, "does not exist; did you mean broken.model"),
        (("SentencePieceTokenizer", str(broken)), {}, "cannot build a SentencePieceTokenizer from .*broken.model: "),
        (("SentencePieceTokenizer", model_path), {"special_tokens": ["<x>"]}, "cannot build .*Special tokens must be"),
        (("NullTokenizer",), {}, "NullTokenizer needs --vocab-size"),
        ((BYTE_LEVEL, model_path), {}, "ByteLevelTokenizer has no model, but --tokenizer-model is given: leave it out"),
        ((BYTE_LEVEL,), {"special_tokens": ["<pad>"]}, "names a token twice, or one of .*: name every token once"),
    ]
    for arguments, options, message in cases:
        with pytest.raises(UserError, match=message):
            build_tokenizer(*arguments, **options)


def test_a_package_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="HuggingFaceTokenizer needs a package: pip install transformers"):
        build_tokenizer("HuggingFaceTokenizer", "anything")
