"""Numbers of arXiv 2505.06708."""

ADDED = {
    "baseline": 0,
    "sdpa-elementwise": 201_326_592,
    "sdpa-headwise": 1_572_864,
    "value-elementwise": 25_165_824,
    "value-headwise": 196_608,
    "key-elementwise": 25_165_824,
    "query-elementwise": 201_326_592,
    "output-elementwise": 100_663_296,
    "sdpa-elementwise-shared": 201_326_592,
    "value-elementwise-shared": 25_165_824,
    "sdpa-elementwise-additive-silu": 201_326_592,
    "sdpa-elementwise-silu": 201_326_592,
    "sdpa-elementwise-additive-identity": 201_326_592,
    "sdpa-elementwise-ns-sigmoid": 201_326_592,
    "sdpa-constant": 98_304,
    "sdpa-rmsnorm": 98_304,
    "sdpa-silu": 0,
}
"""The paper's table of parameters added to its 15A2B model; head-shared gates have the same projection."""
