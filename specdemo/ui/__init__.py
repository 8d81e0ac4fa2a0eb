"""The page: it turns controls into comparisons and runs into lines of JSON. It has no algorithms."""
