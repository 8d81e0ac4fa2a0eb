"""KV cache of targets and heads: store, view (a span of columns), mask, history, snapshot and CUDA graph."""
