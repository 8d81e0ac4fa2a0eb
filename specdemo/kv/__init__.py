"""KV cache of targets and heads: storage, masks, committed and provisional columns, CUDA graphs."""
