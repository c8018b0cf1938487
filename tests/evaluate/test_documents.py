"""Windows hold every token of the documents, each predicted once, for any lengths."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagate.errors import UserError
from megagate.evaluate.documents import batches, check_vocabulary, windows

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=6)


def documents_of(lengths):
    stream = np.arange(sum(lengths), dtype=np.uint16)
    return np.split(stream, np.cumsum(lengths)[:-1]), stream


@given(lengths=LENGTHS, seq_length=st.integers(1, 50))
def test_every_token_but_the_first_is_predicted_once_in_order(lengths, seq_length):
    documents, stream = documents_of(lengths)
    cut = [window.tokens for window in windows(documents, seq_length)]
    labels = np.concatenate([window[1:] for window in cut]) if cut else np.empty(0)
    inputs = np.concatenate([window[:-1] for window in cut]) if cut else np.empty(0)
    assert labels.tolist() == stream[1:].tolist()
    assert inputs.tolist() == stream[:-1].tolist()
    assert all(len(window) == seq_length + 1 for window in cut[:-1])
    assert all(window.counted == len(window.tokens) - 1 for window in windows(documents, seq_length))


@given(lengths=LENGTHS, seq_length=st.integers(1, 20), data=st.data())
def test_overlapping_windows_count_each_label_once_with_enough_before_it(lengths, seq_length, data):
    documents, stream = documents_of(lengths)
    stride = data.draw(st.integers(1, seq_length))
    found = list(windows(documents, seq_length, stride))
    counted = [window.tokens[-window.counted :] for window in found]
    assert (np.concatenate(counted).tolist() if counted else []) == stream[1:].tolist()
    for number, window in enumerate(found):
        assert window.tokens[0] == number * stride, "the tokens are their places in the stream"
        assert len(window.tokens) <= seq_length + 1
        before = len(window.tokens) - window.counted
        assert number == 0 or before >= seq_length - stride + 1


@given(lengths=LENGTHS, seq_length=st.integers(1, 20), size=st.integers(1, 5))
def test_batches_hold_the_windows_in_order(lengths, seq_length, size):
    documents, _ = documents_of(lengths)
    found = list(batches(documents, seq_length, size))
    rows = [(row.tolist(), count) for batch in found for row, count in zip(batch.tokens, batch.counted, strict=True)]
    assert rows == [(window.tokens.tolist(), window.counted) for window in windows(documents, seq_length)]
    assert all(1 <= len(batch.tokens) <= size for batch in found)


def test_tokens_outside_the_vocabulary_are_named():
    check_vocabulary(np.array([0, 9]), 10, "data")
    with pytest.raises(UserError, match="data holds the token 10, but the model's vocabulary has 10 tokens"):
        check_vocabulary(np.array([0, 10]), 10, "data")
    with pytest.raises(UserError, match="token -1"):
        check_vocabulary(np.array([[-1, 3]]), 10, "data")
