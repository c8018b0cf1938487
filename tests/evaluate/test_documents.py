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
    cut = list(windows(documents, seq_length))
    labels = np.concatenate([window[1:] for window in cut]) if cut else np.empty(0)
    inputs = np.concatenate([window[:-1] for window in cut]) if cut else np.empty(0)
    assert labels.tolist() == stream[1:].tolist()
    assert inputs.tolist() == stream[:-1].tolist()
    assert all(len(window) == seq_length + 1 for window in cut[:-1])


@given(lengths=LENGTHS, seq_length=st.integers(1, 20), size=st.integers(1, 5))
def test_batches_hold_the_windows_in_order(lengths, seq_length, size):
    documents, _ = documents_of(lengths)
    found = list(batches(documents, seq_length, size))
    rows = [row.tolist() for batch in found for row in batch]
    assert rows == [window.tolist() for window in windows(documents, seq_length)]
    assert all(1 <= len(batch) <= size for batch in found)


def test_tokens_outside_the_vocabulary_are_named():
    check_vocabulary(np.array([0, 9]), 10, "data")
    with pytest.raises(UserError, match="data holds the token 10, but the model's vocabulary has 10 tokens"):
        check_vocabulary(np.array([0, 10]), 10, "data")
    with pytest.raises(UserError, match="token -1"):
        check_vocabulary(np.array([[-1, 3]]), 10, "data")
