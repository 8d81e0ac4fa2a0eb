"""Everything that knows transformers: loading, the target, its history, text. And the toy target that knows nothing."""
